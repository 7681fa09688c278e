"""What Fabric has to know of the ranks, so that `all_reduce`, `broadcast`, `barrier` and their like work in a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn

from nano_loop.config.precisions import PRECISIONS
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.tensor_collectives import gathered, reduced
from nano_loop.integrations.fabric.fabric import (
    ClusterEnvironment,
    DDPStrategy,
    Fabric,
    LightningEnvironment,
    OwnPrecision,
    SingleDeviceStrategy,
)


class RanksEnvironment(ClusterEnvironment):
    """Gives Fabric the place of this rank, which nano_loop has found: in the ranks of the run, while there is one."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    @property
    def creates_processes_externally(self) -> bool:
        """True: Fabric starts nothing."""
        return True

    @property
    def main_address(self) -> str:
        """Not used: the process group is there already."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Not used either."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return False: it is always given outright."""
        return False

    def world_size(self) -> int:
        """Return how many ranks there are."""
        return self.ranks.size

    def set_world_size(self, size: int) -> None:
        """Ignore what Fabric has computed."""

    def global_rank(self) -> int:
        """Return this rank."""
        return self.ranks.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore what Fabric has computed."""

    def local_rank(self) -> int:
        """Return the rank on this host."""
        return self.ranks.local_rank

    def node_rank(self) -> int:
        """Return which host this is, where all have as many ranks."""
        return self.ranks.rank // self.ranks.local_size


class RanksStrategy(DDPStrategy):
    """Collectives among the ranks of a run; models are not wrapped, for gradients are averaged by hooks.

    Collectives over all ranks wait in Python, so that Ctrl-C and a rank that has failed end them.
    """

    # Fabric starts no process.
    launcher = property(lambda self: None)

    def __init__(self, environment: RanksEnvironment, precision: Any) -> None:
        super().__init__(cluster_environment=environment, precision=precision)
        self.environment = environment

    @property
    def ranks(self) -> Ranks:
        """The ranks of the run."""
        return self.environment.ranks

    @property
    def root_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def setup_environment(self) -> None:
        """Do nothing: the process group is made when a run begins."""

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Return `module` itself."""
        return module

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce `tensor` in place over all ranks, and return it; what is no tensor comes back as it is."""
        return reduced(self.ranks, tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension."""
        return gathered(self.ranks, tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank `src` has as `obj`."""
        return self.ranks.broadcast(obj, src) if distributed.is_initialized() else obj

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if distributed.is_initialized():
            self.ranks.barrier()


def fabric_arguments(precision: str, ranks: Ranks) -> dict[str, Any]:
    """Return what `Fabric.__init__` needs on the CPU, in Fabric's name of a precision, for the ranks of the next run.

    The strategy and the cluster environment are passed outright, since Fabric takes a mere ``SLURM_NTASKS`` in the
    environment for a launch.
    """
    plugin = OwnPrecision(PRECISIONS[precision])
    if ranks.size == 1:
        alone = SingleDeviceStrategy(torch.device("cpu"), precision=plugin)
        return {"accelerator": "cpu", "devices": 1, "strategy": alone, "plugins": [LightningEnvironment()]}
    strategy = RanksStrategy(RanksEnvironment(ranks), plugin)
    return {"accelerator": "cpu", "devices": ranks.local_size, "strategy": strategy}


class RanksFabric(Fabric):
    """The Fabric in a `nano_loop.TorchNano`, made by `_be_fabric`, there and anew in each worker."""

    def _be_fabric(self, precision: str, ranks: Ranks) -> None:
        """Be a Fabric in this precision for the ranks of the runs to come."""
        own = set(vars(self))
        Fabric.__init__(self, **fabric_arguments(precision, ranks))
        if ranks.size > 1:
            Fabric.launch(self)  # starts nothing, and lets Fabric's collectives be called
        self._nano_ranks = ranks
        self._nano_fabric = frozenset(set(vars(self)) - own)

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels: all but Fabric's own attributes, which are made anew where it arrives."""
        return {name: value for name, value in vars(self).items() if name not in self._nano_fabric}

    @contextmanager
    def _among(self, ranks: Ranks) -> Iterator[None]:
        """Let Fabric's collectives be those of a run."""
        if not isinstance(self.strategy, RanksStrategy):
            yield
            return
        environment = self.strategy.environment
        environment.ranks = ranks
        try:
            yield
        finally:
            environment.ranks = self._nano_ranks
