"""Lightning Fabric, imported without side effects, and what it and Lightning have to know of the ranks of a run.

Importing Fabric sets environment variables, adds a handler to its logger, changes the format of warnings, and replaces
`torch.compile`. Importing nano_loop must not change the process, so all of these are restored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from torch import nn

from nano_loop.config.precisions import PRECISIONS, PrecisionKind
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.comm.tensor_collectives import gathered, reduced
from nano_loop.integrations.quiet_import import leaving_no_trace
from nano_loop.precision.autocast.autocast import cpu_autocast

_COMPARED = "torchmetrics"


@contextmanager
def _torchmetrics_by_version() -> Iterator[None]:
    """Give Fabric, which imports torchmetrics to see its version, the version alone.

    torchmetrics imports transformers where that is installed, which takes seconds.
    """
    version_only = ModuleType(_COMPARED)
    version_only.__spec__ = ModuleSpec(_COMPARED, None)
    try:
        if _COMPARED in sys.modules:
            raise PackageNotFoundError
        version_only.__version__ = version(_COMPARED)  # type: ignore[attr-defined]
    except PackageNotFoundError:
        yield
        return
    sys.modules[_COMPARED] = version_only
    try:
        yield
    finally:
        if sys.modules.get(_COMPARED) is version_only:
            del sys.modules[_COMPARED]


# By which Lightning logs, if it is imported.
_rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
_REPLACED = ((torch, "compile"), *([] if _rank_zero is None else [(_rank_zero, "log")]))

with leaving_no_trace("lightning_fabric", *_REPLACED), _torchmetrics_by_version():
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import ClusterEnvironment, Precision
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment as SLURMEnvironment  # for others
    from lightning_fabric.strategies.ddp import DDPStrategy
    from lightning_fabric.strategies.single_device import SingleDeviceStrategy


class OwnPrecision(Precision):
    """Autocast for ``Fabric.autocast()`` only.

    Fabric's own plugins also cast inputs, reject a plain ``loss.backward()``, and take fp16 for bf16.

    Parameters
    ----------
    kind : PrecisionKind
        The precision.
    """

    def __init__(self, kind: PrecisionKind) -> None:
        super().__init__()
        self.kind = kind
        if kind.autocast is not None:
            self.precision = kind.name  # type: ignore[assignment]

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context for ``with self.autocast():``, which has no effect in a precision without autocast."""
        return nullcontext() if self.kind.autocast is None else cpu_autocast(self.kind.autocast)


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
        """Reduce `tensor` in place over all ranks, and return it; anything but a tensor comes back unchanged."""
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
