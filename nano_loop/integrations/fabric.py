"""Lightning Fabric, imported without side effects, and the ranks of a run for Fabric and Lightning.

Importing Fabric sets environment variables, adds a handler to its logger, changes the format of warnings, and replaces
`torch.compile`. Importing nano_loop must not change the process, so we restore all of these.
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
    """Give Fabric, which only checks torchmetrics' version, a stub: the import may take seconds, for transformers."""
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


# Lightning's logging module, if it is imported.
_rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
_REPLACED = ((torch, "compile"), *([] if _rank_zero is None else [(_rank_zero, "log")]))

with leaving_no_trace("lightning_fabric", *_REPLACED), _torchmetrics_by_version():
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import ClusterEnvironment, Precision
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.plugins.environments.slurm import SLURMEnvironment as SLURMEnvironment  # re-exported
    from lightning_fabric.strategies.ddp import DDPStrategy
    from lightning_fabric.strategies.single_device import SingleDeviceStrategy


class OwnPrecision(Precision):
    """Autocast for ``Fabric.autocast()`` only: Fabric's own plugins cast inputs, and reject a plain ``backward()``."""

    def __init__(self, kind: PrecisionKind) -> None:
        super().__init__()
        self.kind = kind
        if kind.autocast is not None:
            self.precision = kind.name  # type: ignore[assignment]

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context for ``with self.autocast():``. It has no effect in a precision without autocast."""
        return nullcontext() if self.kind.autocast is None else cpu_autocast(self.kind.autocast)


class RanksEnvironment(ClusterEnvironment):
    """Gives Fabric and Lightning the ranks of this process, in the current run or the next one."""

    # Fabric starts no processes, and the process group already exists, so that the address is not used.
    creates_processes_externally, main_address, main_port = True, "127.0.0.1", 0
    detect = staticmethod(lambda: False)  # it is always passed explicitly

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.ranks.size

    def set_world_size(self, size: int) -> None:
        """Ignore Fabric's value."""

    def global_rank(self) -> int:
        """Return this rank."""
        return self.ranks.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore Fabric's value."""

    def local_rank(self) -> int:
        """Return the rank on this host."""
        return self.ranks.local_rank

    def node_rank(self) -> int:
        """Return the index of this host, assuming that all hosts have the same number of ranks."""
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
    """The common part of strategies for Fabric and Lightning: the CPU, and collectives that wait in Python."""

    cluster_environment: Any
    root_device = torch.device("cpu")

    @property
    def ranks(self) -> Ranks:
        """The ranks of the current run or the next one."""
        ranks: Ranks = self.cluster_environment.ranks
        return ranks

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce `tensor` in place over all ranks, and return it. Other objects are returned unchanged."""
        return reduced(self.ranks, tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    reduce = all_reduce  # Lightning's name

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension, or with one rank the tensor itself."""
        return tensor if self.ranks.size == 1 else gathered(self.ranks, tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the `obj` of rank `src`."""
        return self.ranks.broadcast(obj, src) if self.ranks.have_joined else obj

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if self.ranks.have_joined:
            self.ranks.barrier()


class RanksStrategy(RanksCollectives, DDPStrategy):
    """Fabric's strategy for several ranks. It does not wrap models, since hooks average gradients."""

    # Fabric starts no processes.
    launcher = property(lambda self: None)

    def setup_environment(self) -> None:
        """Do nothing: the process group is created when a run begins."""

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Return `module` itself."""
        return module


def fabric_arguments(precision: str, ranks: Ranks) -> dict[str, Any]:
    """Return `Fabric`'s arguments for a precision and ranks, all explicit: it takes ``SLURM_NTASKS`` for a launch."""
    plugin = OwnPrecision(PRECISIONS[precision])
    if ranks.size == 1:
        alone = SingleDeviceStrategy(torch.device("cpu"), precision=plugin)
        return {"accelerator": "cpu", "devices": 1, "strategy": alone, "plugins": [LightningEnvironment()]}
    strategy = RanksStrategy(cluster_environment=RanksEnvironment(ranks), precision=plugin)
    return {"accelerator": "cpu", "devices": ranks.local_size, "strategy": strategy}


class RanksFabric(Fabric):
    """The Fabric in a `nano_loop.TorchNano`. `_be_fabric` initializes it, also in each worker."""

    def _be_fabric(self, precision: str, ranks: Ranks) -> None:
        """Initialize Fabric with this precision for the ranks of later runs."""
        own = set(vars(self))
        Fabric.__init__(self, **fabric_arguments(precision, ranks))
        if ranks.size > 1:
            Fabric.launch(self)  # starts no processes, but enables Fabric's collectives
        self._nano_fabric = frozenset(set(vars(self)) - own)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: all attributes except Fabric's own, which the receiver creates again."""
        return {name: value for name, value in vars(self).items() if name not in self._nano_fabric}

    def _among(self, ranks: Ranks) -> AbstractContextManager[None]:
        """Let Fabric's collectives use the ranks of a run."""
        strategy = self.strategy
        return strategy.cluster_environment.among(ranks) if isinstance(strategy, RanksStrategy) else nullcontext()
