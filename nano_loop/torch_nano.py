"""TorchNano: the contract between a user's training loop and what makes it faster."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nano_loop.checks import check_kinds, check_loop
from nano_loop.distributed.strategy import RanksFabric
from nano_loop.errors import NanoError, problem
from nano_loop.options import Options
from nano_loop.parts import Parts
from nano_loop.report import SetupReport
from nano_loop.run import Run, Settings, Task
from nano_loop.signatures import documented, method_takes, named


@documented
class TorchNano(RanksFabric):
    """Subclass it, move the training loop into ``train``, and call ``self.setup`` on its objects.

    It is a `lightning_fabric.Fabric`: ``backward``, ``all_reduce``, ``save``, ``print``, ``device`` and their like are
    there. Everything that ``setup`` changes is as it was when ``train`` has returned or raised.

    Each option may also come from the environment, as ``NANO_LOOP_<OPTION>``, which wins over the arguments.

    Parameters
    ----------
    {options}
    **others
        ``strategy`` is tolerated for BigDL-Nano's sake, with a `NanoWarning`. Any other name is an error.

    Attributes
    ----------
    report : SetupReport or None
        What the last run applied and skipped; None before its first ``setup``.

    Raises
    ------
    NanoConfigError
        If arguments cannot be used; all of them are named.
    NanoError
        If what is asked for is not in this version.

    Notes
    -----
    Calling ``train`` with several processes raises a `NanoWorkerError` where one of the others fails.

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

    @method_takes(Options)
    def __init__(self, *args: Any, **others: Any) -> None:
        self._nano_settings = Settings.read(named("TorchNano", args, others))
        self._nano_run: Run | None = None
        self._nano_report: SetupReport | None = None
        self._set_up_fabric()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up what was pickled."""
        vars(self).update(state)
        self._set_up_fabric()

    def _set_up_fabric(self) -> None:
        self._be_fabric(str(self._nano_settings.options.precision), self._nano_settings.expected_ranks())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make ``train`` of each subclass a run."""
        super().__init_subclass__(**kwargs)
        if not hasattr(cls.train, "starts_run"):  # its own, or from a class beside TorchNano
            check_loop(cls.train, f"{cls.__name__}.train")
            cls.train = _as_run(cls.train)  # type: ignore[method-assign]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Override this with the training loop; calling it starts a run, and returns what the loop returns."""
        given = f"{type(self).__name__} has no train method"
        raise NanoError(problem(given, "TorchNano runs the one that a subclass defines", "Define train(self, ...)"))

    @property
    def report(self) -> SetupReport | None:
        """What the last run applied and skipped; None before the first ``setup``."""
        return self._nano_report

    def setup(  # type: ignore[override]
        self, model: nn.Module, optimizer: Any, *dataloaders: DataLoader[Any], move_to_device: bool = True
    ) -> Any:
        """Accelerate a model, its optimizers and its loaders in place, until ``train`` ends.

        Parameters
        ----------
        model : torch.nn.Module
            Gets the layout and the precision that the options ask for; its parameters stay the same objects.
        optimizer : torch.optim.Optimizer, or a list or tuple of them
            Is switched to fused kernels where they fit.
        *dataloaders : torch.utils.data.DataLoader
            Keep their class and their attributes.
        move_to_device : bool
            Move the model to the CPU if it is elsewhere.

        Returns
        -------
        tuple
            ``(model, optimizer)``, ``(model, optimizer, loader)``, or with several loaders
            ``(model, optimizer, [loader, ...])``: the very objects that were given.

        Raises
        ------
        NanoConfigError
            If an argument is of another kind, or an option that was asked for by name cannot be honoured.
        NanoError
            If it is called outside ``train``.
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
        """Accelerate a model that needs no optimizer; see `setup`."""
        self.setup(module, [], move_to_device=move_to_device)
        return module

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Accelerate optimizers alone; see `setup`. One comes back as it is, several as a tuple."""
        check_kinds(("optimizers", Optimizer, optimizers))
        self._accelerate(Parts(optimizers=list(optimizers)))
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def setup_dataloaders(
        self,
        *dataloaders: DataLoader[Any],
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        shard: bool | None = None,
    ) -> Any:
        """Accelerate loaders alone; see `setup`. One comes back as it is, several as a list.

        Parameters
        ----------
        *dataloaders : torch.utils.data.DataLoader
            Keep their class and their attributes.
        use_distributed_sampler : bool
            Fabric's: False means the same as ``shard=False``.
        move_to_device : bool
            Fabric's; batches are on the CPU already.
        shard : bool, optional
            Under several processes: whether each gets its own share of the batches, always or never. By default it
            does, except while gradients are off or every model is in eval mode.
        """
        check_kinds(("dataloaders", DataLoader, dataloaders))
        shard = shard if use_distributed_sampler else False
        self._accelerate(Parts(loaders=list(dataloaders), shard=shard))
        return dataloaders[0] if len(dataloaders) == 1 else list(dataloaders)

    def _accelerate(self, parts: Parts) -> None:
        run = self._active_run
        try:
            run.apply(parts)
        finally:
            self._nano_report = run.report

    @property
    def _active_run(self) -> Run:
        if self._nano_run is None:
            given = "setup was called outside train"
            needed = "what it changes is put back when train ends"
            raise NanoError(problem(given, needed, "Call it in train, and call train from outside"))
        return self._nano_run

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Return a context in which backwards leave the gradients of `module` unaveraged.

        They are averaged, with all that has come together, by the first backward outside of it. With one process there
        is nothing to leave out.

        Parameters
        ----------
        module : torch.nn.Module
            A model that was set up.
        enabled : bool
            With False, the context does nothing.
        """
        check_kinds(("module", nn.Module, [module]))
        if self._nano_run is None or not enabled:
            return nullcontext()
        return self._nano_run.without_averaging(module)

    def _start(self, train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._nano_run is not None:  # train calls super().train(), or a worker's run has begun
            return train(self, *args, **kwargs)
        task = _Training(self, train, args, kwargs)
        with Run(self._nano_settings, task) as run:
            return task.do(run)

    @contextmanager
    def _inside(self, run: Run) -> Iterator[None]:
        """Let ``setup`` and Fabric's collectives be those of a run."""
        self._nano_run, self._nano_report = run, None
        with self._among(run.ranks):
            try:
                yield
            finally:
                self._nano_run = None

    def _names(self, train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        """Return what workers get, by the names that the user knows."""
        try:
            bound = inspect.signature(train).bind(self, *args, **kwargs).arguments
        except TypeError:  # the call itself will say so
            return {}
        return {**bound, **{f"self.{name}": value for name, value in self.__getstate__().items()}}


class _Training(Task):
    """``loop.train(*args, **kwargs)``."""

    def __init__(
        self, loop: TorchNano, train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(loop._nano_settings, loop._names(train, args, kwargs))
        self._loop, self._args, self._kwargs = loop, args, kwargs
        self._train: Callable[..., Any] | None = train

    def do(self, run: Run) -> Any:
        """See `Task.do`."""
        train = self._train or getattr(type(self._loop).train, "__wrapped__")  # noqa: B009
        with self._loop._inside(run):
            return train(self._loop, *self._args, **self._kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: the function is found by the class again."""
        return {**super().__getstate__(), "_train": None}


def _as_run(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def run(self: TorchNano, *args: Any, **kwargs: Any) -> Any:
        if "_nano_settings" not in vars(self):
            given = f"{type(self).__name__}.__init__ did not call TorchNano's"
            raise NanoError(problem(given, "the options are read there", "Call super().__init__(...) in it"))
        return self._start(train, args, kwargs)

    run.starts_run = True  # type: ignore[attr-defined]
    return run
