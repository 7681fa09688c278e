"""TorchNano: the contract between a user's training loop and what makes it faster."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nano_loop.checks import check_kinds, check_loop
from nano_loop.config import OPTIONS, NanoConfig
from nano_loop.cpu import read_machine
from nano_loop.distributed.launch.joining import expected_ranks, joined
from nano_loop.distributed.seat import Seat
from nano_loop.distributed.strategy import RanksFabric
from nano_loop.errors import NanoError, NanoWarning, problem, shown
from nano_loop.parts import Parts
from nano_loop.pipeline import Pipeline
from nano_loop.report import SetupReport
from nano_loop.steps import resolve_precision
from nano_loop.this_version import refuse_what_is_not_in_this_version

_Auto = bool | Literal["auto"]


class TorchNano(RanksFabric):
    """Subclass it, move the training loop into ``train``, and call ``self.setup`` on its objects.

    It is a `lightning_fabric.Fabric`: ``backward``, ``all_reduce``, ``save``, ``print``, ``device`` and their like are
    there. Everything that ``setup`` changes is as it was when ``train`` has returned or raised.

    Each option may also come from the environment, as ``NANO_LOOP_<OPTION>``, which wins over the arguments.

    Parameters
    ----------
    num_processes : int, optional
        Data-parallel processes, each on cores of its own; None means one, or as many as torchrun, srun or MPI started.
    use_ipex : bool
        Run the kernels of Intel Extension for PyTorch, of which 2.8 works with torch 2.8 alone.
    distributed_backend : {"subprocess", "spawn", "ray"}
        Who starts the processes; the first two are one. ``"ray"`` is not in this version.
    process_group_backend : str, optional
        torch.distributed's backend; gloo by default.
    precision : {32, "bf16", "auto"} or one of Fabric's names for them
        ``"bf16"`` runs models under bf16 autocast; parameters, gradients and outputs stay fp32. ``"auto"`` does so
        where the CPU has the instructions. 64, 16 and ``"bf16-true"`` are not in this version.
    cpu_for_each_process : list of lists of int, optional
        The logical CPUs of each process; by default even shares of what this process may use.
    channels_last : bool
        Lay 4-D and 5-D inputs of models and of convolutions out as NHWC.
    auto_lr : bool
        Let the learning rate ramp up to its product with the number of processes, over the first 1,000 steps.
    fused_optimizer : bool or "auto"
        Use the fused CPU kernels of Adam, AdamW, SGD and Adagrad.
    allocator : bool or "auto"
        Ask glibc to keep freed memory.
    fast_dropout : bool or "auto"
        Draw dropout's masks with a faster generator; "auto" in reduced precision only.
    fast_attention : bool or "auto"
        Compute bf16 attention by plain matrix products.
    fast_convolution : bool or "auto"
        Compute some gradients of bf16 convolutions by plain matrix products.
    fast_fetch : bool or "auto"
        Index in-memory datasets by whole batches.
    compile : bool or dict
        Give models to `torch.compile`; a dict is passed on as its arguments.
    bf16_ops, fp32_ops : list of str
        Not in this version.
    gradient_compression : {None, "bf16"}
        What gradients are rounded to on their way between processes.
    timeout : float
        Seconds that a process waits for the others.
    verbose : bool or "all"
        Print the report to standard error; with ``"all"`` also what every process prints.
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

    def __init__(
        self,
        num_processes: int | None = None,
        use_ipex: bool = False,
        distributed_backend: str = "subprocess",
        process_group_backend: str | None = None,
        precision: int | str = 32,
        cpu_for_each_process: list[list[int]] | None = None,
        channels_last: bool = False,
        auto_lr: bool = True,
        *,
        fused_optimizer: _Auto = "auto",
        allocator: _Auto = "auto",
        fast_dropout: _Auto = "auto",
        fast_attention: _Auto = "auto",
        fast_convolution: _Auto = "auto",
        fast_fetch: _Auto = "auto",
        compile: bool | dict[str, Any] = False,
        bf16_ops: tuple[str, ...] | list[str] = (),
        fp32_ops: tuple[str, ...] | list[str] = (),
        gradient_compression: str | None = None,
        timeout: float = 600.0,
        verbose: bool | Literal["all"] = True,
        **others: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name in OPTIONS}
        if "strategy" in others:
            _warn_of_strategy(others.pop("strategy"))
        self._nano_config = NanoConfig.from_call({**arguments, **others})
        refuse_what_is_not_in_this_version(self._nano_config)
        self._nano_machine = read_machine()
        self._nano_pipeline: Pipeline | None = None
        self._nano_report: SetupReport | None = None
        self._set_up_fabric()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up what has travelled."""
        vars(self).update(state)
        self._set_up_fabric()

    def _set_up_fabric(self) -> None:
        precision = resolve_precision(self._nano_config, self._nano_machine)
        self._be_fabric(precision, expected_ranks(self._nano_config))

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
        optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        check_kinds(
            ("model", nn.Module, [model]),
            ("optimizer", Optimizer, optimizers),
            ("dataloaders", DataLoader, dataloaders),
        )
        if move_to_device:
            self.to_device(model)
        self._accelerate(Parts([model], optimizers, list(dataloaders)))
        if not dataloaders:
            return model, optimizer
        return model, optimizer, dataloaders[0] if len(dataloaders) == 1 else list(dataloaders)

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
        if self._nano_pipeline is None:
            given = "setup was called outside train"
            needed = "what it changes is put back when train ends"
            raise NanoError(problem(given, needed, "Call it in train, and call train from outside"))
        self._nano_pipeline.apply(parts)
        self._nano_report = self._nano_pipeline.report

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
        if self._nano_pipeline is None or not enabled:
            return nullcontext()
        return self._nano_pipeline.without_averaging(module)

    def _run(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._nano_pipeline is not None:  # train calls super().train()
            return train(self, *args, **kwargs)
        self._nano_report = None
        worker_seat: Seat | None = vars(self).pop("_nano_seat", None)
        task = _TrainTask(self, args, kwargs, self._names(train, args, kwargs))
        with (
            nullcontext(worker_seat) if worker_seat else joined(self._nano_config, self._nano_machine, task) as seat,
            self._among(seat.ranks),
            Pipeline(self._nano_config, seat) as self._nano_pipeline,
        ):
            try:
                return train(self, *args, **kwargs)
            finally:
                self._nano_pipeline = None

    def _names(self, train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        """Return what has to travel to workers, by the names that the user knows."""
        try:
            bound = inspect.signature(train).bind(self, *args, **kwargs).arguments
        except TypeError:  # the call itself will say so
            return {}
        return {**bound, **{f"self.{name}": value for name, value in self.__getstate__().items()}}


@dataclass
class _TrainTask:
    """``loop.train(*args, **kwargs)``, on every rank."""

    loop: TorchNano
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _TrainTask, (self.loop, self.args, self.kwargs, {})

    def run_in(self, seat: Seat) -> object:
        vars(self.loop)["_nano_seat"] = seat
        return self.loop.train(*self.args, **self.kwargs)


def _as_run(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def run(self: TorchNano, *args: Any, **kwargs: Any) -> Any:
        if "_nano_config" not in vars(self):
            given = f"{type(self).__name__}.__init__ did not call TorchNano's"
            raise NanoError(problem(given, "the options are read there", "Call super().__init__(...) in it"))
        return self._run(train, *args, **kwargs)

    run.starts_run = True  # type: ignore[attr-defined]
    return run


def _warn_of_strategy(value: Any) -> None:
    allowed = "nano_loop has one strategy, so the argument changes nothing"
    warnings.warn(problem(shown("strategy", value), allowed, "Leave it out"), NanoWarning, stacklevel=3)
