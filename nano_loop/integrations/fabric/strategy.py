"""What Fabric and Lightning have to know of the ranks, so that `all_reduce` and the like work in a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

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
    """Gives Fabric and Lightning the place of this rank: in the ranks of the run to come, or of the one under way."""

    # Fabric starts nothing, and the process group is there already, so that nobody asks for an address.
    creates_processes_externally, main_address, main_port = True, "127.0.0.1", 0
    detect = staticmethod(lambda: False)  # it is always given outright

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

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

    @contextmanager
    def among(self, ranks: Ranks) -> Iterator[None]:
        """Return a context in which the ranks are those of a run."""
        before, self.ranks = self.ranks, ranks
        try:
            yield
        finally:
            self.ranks = before


class RanksCollectives:
    """What strategies of Fabric and Lightning have in common: the CPU, and collectives among the ranks of a run.

    Collectives over all ranks wait in Python, so that Ctrl-C and a rank that has failed end them. Outside of a run they
    do nothing.
    """

    cluster_environment: Any
    root_device = torch.device("cpu")

    @property
    def ranks(self) -> Ranks:
        """The ranks of the run that is under way, or of the one to come."""
        ranks: Ranks = self.cluster_environment.ranks
        return ranks

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce `tensor` in place over all ranks, and return it; what is no tensor comes back as it is."""
        return reduced(self.ranks, tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    reduce = all_reduce  # Lightning's name

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension; with one rank, the tensor."""
        return tensor if self.ranks.size == 1 else gathered(self.ranks, tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank `src` has as `obj`."""
        return self.ranks.broadcast(obj, src) if self.ranks.have_joined else obj

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if self.ranks.have_joined:
            self.ranks.barrier()


class RanksStrategy(RanksCollectives, DDPStrategy):
    """Fabric's strategy for several ranks. It wraps no models, for gradients are averaged by hooks."""

    # Fabric starts no process.
    launcher = property(lambda self: None)

    def setup_environment(self) -> None:
        """Do nothing: the process group is made when a run begins."""

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Return `module` itself."""
        return module


def fabric_arguments(precision: str, ranks: Ranks) -> dict[str, Any]:
    """Return what `Fabric.__init__` needs on the CPU, in Fabric's name of a precision, for the ranks of the next run.

    The strategy and the cluster environment are passed outright, since Fabric takes a mere ``SLURM_NTASKS`` in the
    environment for a launch.
    """
    plugin = OwnPrecision(PRECISIONS[precision])
    if ranks.size == 1:
        alone = SingleDeviceStrategy(torch.device("cpu"), precision=plugin)
        return {"accelerator": "cpu", "devices": 1, "strategy": alone, "plugins": [LightningEnvironment()]}
    strategy = RanksStrategy(cluster_environment=RanksEnvironment(ranks), precision=plugin)
    return {"accelerator": "cpu", "devices": ranks.local_size, "strategy": strategy}


class RanksFabric(Fabric):
    """The Fabric in a `nano_loop.TorchNano`, made by `_be_fabric`, there and anew in each worker."""

    def _be_fabric(self, precision: str, ranks: Ranks) -> None:
        """Be a Fabric in this precision for the ranks of the runs to come."""
        own = set(vars(self))
        Fabric.__init__(self, **fabric_arguments(precision, ranks))
        if ranks.size > 1:
            Fabric.launch(self)  # starts nothing, and lets Fabric's collectives be called
        self._nano_fabric = frozenset(set(vars(self)) - own)

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels: all but Fabric's own attributes, which are made anew where it arrives."""
        return {name: value for name, value in vars(self).items() if name not in self._nano_fabric}

    def _among(self, ranks: Ranks) -> AbstractContextManager[None]:
        """Let Fabric's collectives be those of a run."""
        strategy = self.strategy
        return strategy.cluster_environment.among(ranks) if isinstance(strategy, RanksStrategy) else nullcontext()
