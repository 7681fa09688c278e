"""TorchNano: the base class whose ``train`` method runs accelerated."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from nano_loop.api import collectives
from nano_loop.config.declarations import Declarations
from nano_loop.config.signatures import documented, method_takes, named
from nano_loop.distributed.comm.ranks import Loop
from nano_loop.errors import NanoConfigError, NanoError, error_message
from nano_loop.integrations.cuda_calls import is_cuda_patched
from nano_loop.integrations.fabric import RanksFabric
from nano_loop.runtime.objects.report import SetupReport
from nano_loop.runtime.objects.training_objects import TrainingObjects, check_kinds, check_loop
from nano_loop.runtime.run import Run, RunTask
from nano_loop.runtime.settings import OptionAttributes, Settings


@documented
class TorchNano(OptionAttributes, RanksFabric):
    """Base class for an accelerated training loop.

    Subclass it, move the training loop into ``train``, and call ``self.setup`` on the model, the optimizer and the
    loaders. When ``train`` returns or raises, every change that ``setup`` made is undone.

    The class is a `lightning_fabric.Fabric`, with ``backward``, ``all_reduce``, ``save``, ``print``, ``device`` and
    the other methods of Fabric.

    Each option can also be set in the environment, as ``NANO_LOOP_<OPTION>``, which overrides the argument.

    Parameters
    ----------
    {options}
    **others
        ``strategy``, and ``accelerator``, ``devices``, ``num_nodes`` and ``plugins`` with their values for one CPU, are
        accepted for compatibility with BigDL-Nano, with a `NanoWarning`. Any other name is an error.

    Attributes
    ----------
    report : SetupReport or None
        The steps that the last run applied and skipped. None before its first ``setup``.
    num_processes : int
        The number of processes. Read-only, like all attributes below.
    use_ipex, channels_last, auto_lr : bool
        The options.
    cpu_for_each_process : list of lists of int, int, or None
        The option.
    dtype : torch.dtype
        The dtype in which models compute matrix products: `torch.bfloat16` or `torch.float32`.

    Raises
    ------
    NanoConfigError
        If arguments are invalid. The message lists all of them.
    NanoError
        If this version does not support an option.

    Notes
    -----
    With several processes, ``train`` raises a `NanoWorkerError` if another rank fails.

    Examples
    --------
    >>> import torch
    >>> class MyNano(TorchNano):
    ...     def train(self, model, optimizer, loader):
    ...         model, optimizer, loader = self.setup(model, optimizer, loader)
    ...         for x, y in loader:
    ...             optimizer.zero_grad()
    ...             torch.nn.functional.mse_loss(model(x), y).backward()
    ...             optimizer.step()
    >>> data = torch.utils.data.TensorDataset(torch.rand(8, 4), torch.rand(8, 1))
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> MyNano(verbose=False).train(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    """

    @method_takes(Declarations)
    def __init__(self, *args: Any, **others: Any) -> None:
        if TYPE_CHECKING:
            Declarations(**others)  # never runs: jedi completes arguments by the call that receives them
        self._nano_settings = Settings.read(named("TorchNano", args, others))
        self._nano_run: Run | None = None
        self._nano_report: SetupReport | None = None
        self._nano_printed: list[str] = []
        self._nano_settings.prepare(type(self))
        self._set_up_fabric()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the pickled state."""
        vars(self).update(state)
        self._set_up_fabric()

    def _set_up_fabric(self) -> None:
        self._be_fabric(str(self._nano_settings.options.precision), self._nano_settings.expected_ranks())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap ``train`` of each subclass, so that a call starts a run."""
        super().__init_subclass__(**kwargs)
        if not hasattr(cls.train, "starts_run"):  # defined in the subclass, or inherited from another base class
            check_loop(cls.train, f"{cls.__name__}.train")
            cls.train = _as_run(cls.train)  # type: ignore[method-assign]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training loop. A subclass overrides this method.

        A call starts a run and returns the return value of the loop.
        """
        got = f"{type(self).__name__} has no train method"
        raise NanoError(error_message(got, "a subclass of TorchNano must define it", "Define train(self, ...)"))

    @property
    def report(self) -> SetupReport | None:
        """The steps that the last run applied and skipped. None before the first ``setup``."""
        return self._nano_report

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self.world_size

    @property
    def device(self) -> torch.device:
        """The CPU. A subclass may assign it, as some scripts do."""
        return torch.device("cpu")

    @device.setter
    def device(self, device: Any) -> None:
        kind = torch.device(device).type
        if kind != "cpu" and not (kind == "cuda" and is_cuda_patched()):
            got = f"self.device = {device!r}"
            raise NanoError(error_message(got, "it trains on the CPU", 'Assign "cpu", or call nano_loop.patch_cuda()'))

    def setup(  # type: ignore[override]
        self, model: nn.Module, optimizer: Any = (), *dataloaders: DataLoader[Any], move_to_device: bool = True
    ) -> Any:
        """Accelerate a model, its optimizers and its loaders in place, until ``train`` ends.

        Parameters
        ----------
        model : torch.nn.Module
            The model. It runs in the layout and the precision that the options select. Its parameters stay the same
            objects.
        optimizer : torch.optim.Optimizer, or a list or tuple of them, optional
            The optimizers. Those that support fused kernels are switched to them.
        *dataloaders : torch.utils.data.DataLoader
            The loaders. They keep their class and their attributes. With several processes, other loaders that
            ``train`` iterates are divided as well.
        move_to_device : bool
            Whether to move the model to the CPU if it is on another device.

        Returns
        -------
        object
            ``model`` if it is alone, ``(model, optimizer)``, ``(model, optimizer, loader)``, or with several loaders
            ``(model, optimizer, [loader, ...])``. These are the same objects that were passed.

        Raises
        ------
        NanoConfigError
            If an argument has the wrong type, or an explicitly requested option cannot be applied.
        NanoError
            If the method is called outside ``train``.
        """
        run = self._active_run
        if move_to_device and isinstance(model, nn.Module):
            self.to_device(model)
        try:
            return run.setup(model, optimizer, *dataloaders)
        finally:
            self._nano_report = run.report

    def setup_module(  # type: ignore[override]
        self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> nn.Module:
        """Accelerate a model without an optimizer; see `setup`."""
        self.setup(module, [], move_to_device=move_to_device)
        return module

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Accelerate optimizers only; see `setup`. Returns a single optimizer itself, and several as a tuple."""
        check_kinds(("optimizers", Optimizer, optimizers))
        self._accelerate(TrainingObjects(optimizers=list(optimizers)))
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def setup_dataloaders(
        self,
        *dataloaders: DataLoader[Any],
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        shard: bool | None = None,
        replace_sampler: bool = True,
    ) -> Any:
        """Accelerate loaders only; see `setup`. Returns a single loader itself, and several as a list.

        Parameters
        ----------
        *dataloaders : torch.utils.data.DataLoader
            The loaders. They keep their class and their attributes.
        use_distributed_sampler : bool
            A parameter of Fabric. False means the same as ``shard=False``.
        move_to_device : bool
            A parameter of Fabric. It has no effect, since batches are already on the CPU.
        shard : bool, optional
            With several processes, whether each process always (True) or never (False) gets its own share of the
            batches. By default it does, except while gradients are disabled or every model is in eval mode. In an
            evaluation every process therefore counts all samples, and a sum over N processes is N times too large.
            With True, each process counts its share.
        replace_sampler : bool
            LightningLite's name for ``use_distributed_sampler``.
        """
        check_kinds(("dataloaders", DataLoader, dataloaders))
        shard = shard if use_distributed_sampler and replace_sampler else False
        self._accelerate(TrainingObjects(loaders=list(dataloaders), shard=shard))
        return dataloaders[0] if len(dataloaders) == 1 else list(dataloaders)

    def _accelerate(self, parts: TrainingObjects) -> None:
        run = self._active_run
        try:
            run.apply(parts)
        finally:
            self._nano_report = run.report

    @override
    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See `nano_loop.all_reduce`."""
        return collectives.all_reduce(data, group, reduce_op)

    @override
    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """See `nano_loop.all_gather`."""
        return collectives.all_gather(data, group, sync_grads)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """See `nano_loop.broadcast`."""
        return collectives.broadcast(obj, src)

    def share(self) -> float:
        """See `nano_loop.share`."""
        return collectives.share()

    @property
    def _active_run(self) -> Run:
        if self._nano_run is None:
            got = "setup was called outside train"
            expected = "its changes are undone when train ends"
            raise NanoError(error_message(got, expected, "Call it in train, and call train from outside"))
        return self._nano_run

    def save(
        self, path: Any = None, state: Any = None, filter: Any = None, *, content: Any = None, filepath: Any = None
    ) -> None:
        """Save a checkpoint on rank 0. All ranks must call this method.

        Parameters
        ----------
        path : str or os.PathLike
            The file. In LightningLite's order, ``save(content, filepath)``, it is the second argument.
        state : dict
            The contents. The state dicts of models and optimizers are saved.
        filter : dict, optional
            See `lightning_fabric.Fabric.save`.
        content, filepath
            LightningLite's names for ``state`` and ``path``.
        """
        values = [value for value in (path, state, content, filepath) if value is not None]
        paths = [os.fspath(value) for value in values if isinstance(value, (str, os.PathLike))]
        contents = [value for value in values if isinstance(value, dict)]
        if (len(paths), len(contents), len(values)) != (1, 1, 2):
            kinds = ", ".join(type(value).__name__ for value in values)
            raise NanoConfigError(
                error_message(f"save({kinds})", "it takes a path and a dict", "Call save(path, state)")
            )
        super().save(paths[0], contents[0], filter)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not average the gradients of `module`.

        The first backward pass after the context averages the accumulated gradients. With one process, the context has
        no effect.

        Parameters
        ----------
        module : torch.nn.Module
            A model that was set up.
        enabled : bool
            If False, the context has no effect.
        """
        check_kinds(("module", nn.Module, [module]))
        if self._nano_run is None or not enabled:
            return nullcontext()
        return self._nano_run.without_averaging(module)

    def _start(self, train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._nano_run is not None:  # train calls super().train(), or a worker has already started the run
            return train(self, *args, **kwargs)
        task = _Training(self, train, args, kwargs)
        return Run(self._nano_settings, task, printed=self._nano_printed).complete()

    @contextmanager
    def _inside(self, run: Run) -> Iterator[None]:
        """Use the run in ``setup``, and its ranks in Fabric's collectives."""
        self._nano_run, self._nano_report = run, None
        with self._among(run.ranks):
            try:
                yield
            finally:
                self._nano_run = None

    def _names(self, train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        """Return the objects that are sent to workers, by their names in the user's code."""
        try:
            bound = inspect.signature(train).bind(self, *args, **kwargs).arguments
        except TypeError:  # the call itself will raise it
            return {}
        return {**bound, **{f"self.{name}": value for name, value in self.__getstate__().items()}}


class _Training(RunTask):
    """``loop.train(*args, **kwargs)``."""

    def __init__(
        self, loop: TorchNano, train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        names = loop._names(train, args, kwargs)
        super().__init__(loop._nano_settings, names, Loop())
        self._loop, self._args, self._kwargs = loop, args, kwargs
        self._train: Callable[..., Any] | None = train
        self.written = f"{type(loop).__name__}(", ")"
        self.setup_hint = "Call self.setup(model, optimizer) in train"

    @override
    def do(self, run: Run) -> Any:
        train = self._train or getattr(type(self._loop).train, "__wrapped__")  # noqa: B009
        with self._loop._inside(run):
            return train(self._loop, *self._args, **self._kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle. It omits the function, which is looked up on the class."""
        return {**super().__getstate__(), "_train": None}


def _as_run(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def run(self: TorchNano, *args: Any, **kwargs: Any) -> Any:
        if "_nano_settings" not in vars(self):
            got = f"{type(self).__name__}.__init__ did not call TorchNano's"
            raise NanoError(error_message(got, "the options are read there", "Call super().__init__(...) in it"))
        return self._start(train, args, kwargs)

    run.starts_run = True  # type: ignore[attr-defined]
    return run
