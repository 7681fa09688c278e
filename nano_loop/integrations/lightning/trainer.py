"""A Trainer with BigDL-Nano's arguments, nano_loop's options and `compile`, without Lightning's base classes."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nano_loop.config.declarations import CHECKS, OPTIONS
from nano_loop.config.environment import read_options
from nano_loop.config.leftovers import REMOVED
from nano_loop.distributed.launch_external.environment import found_launch, local_size
from nano_loop.errors import NanoConfigError, NanoError, NanoWarning, error_message, shown
from nano_loop.integrations.lightning.strategy import PRODUCTS
from nano_loop.runtime.objects.report import SetupReport
from nano_loop.runtime.settings import OptionAttributes, Settings

_MODEL = "model."


class CompiledMixin:
    """The `LightningModule` that ``Trainer.compile`` makes from a model, a loss, an optimizer and other arguments."""

    def __init__(self, model: nn.Module, loss: Any, optimizer: Any, scheduler: Any, metrics: Any) -> None:
        _check(loss, optimizer, scheduler, metrics)
        super().__init__()
        self.model, self.loss = model, loss
        self._optimizer, self._scheduler = optimizer, scheduler
        # Metrics that are modules are registered, with a copy per stage, so that stages do not share their values.
        self.val_metrics, self.test_metrics = (_held(metrics or []) for _ in range(2))
        self._metrics = [None if isinstance(metric, nn.Module) else metric for metric in metrics or []]
        self._names = [f"{_name(metric)}_{number}" for number, metric in enumerate(metrics or [])]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch, and log it as ``train/loss``."""
        if self.loss is None:
            raise NanoError(error_message("fit of a model compiled without a loss", "training needs one", _PASS))
        inputs, target = _split(batch)
        loss: torch.Tensor = self.loss(self(*inputs), target)  # type: ignore[operator]
        self.log("train/loss", loss)  # type: ignore[attr-defined]
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``val/loss`` and the metrics."""
        self._evaluate("val", self.val_metrics, batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``test/loss`` and the metrics."""
        self._evaluate("test", self.test_metrics, batch)

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        """Return the output for a batch, with or without a target as its last element."""
        inputs = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
        has_target = len(inputs) > 1 and len(inputs) > _required(self.model)
        return self(*(inputs[:-1] if has_target else inputs))  # type: ignore[operator]

    def configure_optimizers(self) -> Any:
        """Return the optimizer and the scheduler."""
        if self._optimizer is None:
            raise NanoError(error_message("fit of a model compiled without an optimizer", "training needs one", _PASS))
        if self._scheduler is None:
            return self._optimizer
        own = self._scheduler if isinstance(self._scheduler, Mapping) else {"scheduler": self._scheduler}
        scheduler = {"interval": "epoch", **own}
        if isinstance(scheduler["scheduler"], ReduceLROnPlateau):
            scheduler.setdefault("monitor", "val/loss")
        return {"optimizer": self._optimizer, "lr_scheduler": scheduler}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the state of this module, or of the model alone, which may also have a child ``model``."""
        prefixed = {_MODEL + name: value for name, value in state_dict.items()}
        own = self.state_dict().keys()  # type: ignore[attr-defined]
        if len(own & prefixed.keys()) > len(own & state_dict.keys()):
            state_dict = prefixed
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def _evaluate(self, stage: str, metrics: nn.ModuleList, batch: Any) -> None:
        inputs, target = _split(batch)
        output = self(*inputs)  # type: ignore[operator]
        if self.loss is not None:
            self.log(f"{stage}/loss", self.loss(output, target), sync_dist=True)  # type: ignore[attr-defined]
        modules = iter(metrics)
        for name, function in zip(self._names, self._metrics, strict=True):
            metric: Any = next(modules) if function is None else function
            value = metric(output, target)
            if _is_metric(metric):
                self.log(f"{stage}/{name}", metric, on_epoch=True)  # type: ignore[attr-defined]
            else:
                self.log(f"{stage}/{name}", value, on_epoch=True, sync_dist=True)  # type: ignore[attr-defined]


_PASS = "Pass it to Trainer.compile"


def refuse_compiled_twice(model: nn.Module, **arguments: Any) -> None:
    """Raise if a LightningModule is compiled with arguments that it defines itself."""
    names = [name for name, value in arguments.items() if value is not None]
    if names:
        message = error_message(
            f"compile({type(model).__name__}, {', '.join(f'{name}=' for name in names)})",
            "a LightningModule has its own loss, optimizer, scheduler and metrics",
            "Remove them, or pass a torch.nn.Module",
        )
        raise NanoConfigError(message)


def _check(loss: Any, optimizer: Any, scheduler: Any, metrics: Any) -> None:
    wrong = []
    for name, value, fits, expected in (
        ("loss", loss, callable, "a function or a module"),
        ("optimizer", optimizer, lambda value: isinstance(value, Optimizer), "a torch.optim.Optimizer"),
        ("scheduler", scheduler, _is_scheduler, "an LRScheduler"),
        ("metrics", metrics, _are_metrics, "a list of metrics, each called as metric(output, target)"),
    ):
        if value is not None and not fits(value):
            wrong.append(error_message(f"compile({name}={value!r:.80})", f"it is {expected}", "Pass one, or omit it"))
    if scheduler is not None and optimizer is None:
        wrong.append(error_message("compile(scheduler=...)", "it schedules an optimizer", "Pass optimizer=, too"))
    if wrong:
        raise NanoConfigError("\n".join(wrong))


def _is_scheduler(value: Any) -> bool:
    scheduler = value.get("scheduler") if isinstance(value, Mapping) else value
    return isinstance(scheduler, (LRScheduler, ReduceLROnPlateau))


def _are_metrics(value: Any) -> bool:
    return isinstance(value, Sequence) and all(map(callable, value))


def _held(metrics: Sequence[Any]) -> nn.ModuleList:
    return nn.ModuleList(copy.deepcopy(metric) for metric in metrics if isinstance(metric, nn.Module))


def _name(metric: Any) -> str:
    return str(getattr(metric, "__name__", type(metric).__name__))


def _is_metric(metric: Any) -> bool:
    """Whether Lightning treats it as a metric, resets it after each epoch, and combines it over the ranks."""
    return hasattr(metric, "compute") and hasattr(metric, "reset")


def _split(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs and the target of a batch."""
    if not isinstance(batch, (list, tuple)) or len(batch) < 2:
        got = f"a batch of type {type(batch).__name__}" + (" with one element" if isinstance(batch, Sequence) else "")
        expected = "a compiled model accepts batches of inputs and a target, which is the last element"
        raise NanoError(error_message(got, expected, "Write a LightningModule for other batches"))
    return tuple(batch[:-1]), batch[-1]


def _required(model: nn.Module) -> int:
    """Return the number of required positional arguments of a model."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds and parameter.default is parameter.empty for parameter in parameters)


#: Options that the strategy accepts or refuses.
_OPTIONS = {*OPTIONS, *REMOVED} - {"num_processes", "precision"}
_PRECISIONS = {"32": "32-true", "32-true": "32-true", "bf16": "bf16-mixed", "bf16-mixed": "bf16-mixed"}
#: Arguments that the Trainer refuses, with the reason and a hint.
_REFUSED = {
    "strategy": ("this Trainer has one, NanoStrategy", "Omit it, or use Lightning's Trainer(strategy='nano')"),
    "algorithms": ("nano_loop does not run algorithms of Composer", "Pass callbacks=[...], called at the same points"),
    "use_hpo": ("nano_loop does not search hyperparameters", "Omit it, and call a search library around the Trainer"),
}


class NanoTrainerMixin(OptionAttributes):
    """Lightning's Trainer with the strategy ``"nano"`` and the arguments of BigDL-Nano's Trainer.

    Parameters
    ----------
    num_processes : int, optional
        Number of data-parallel processes; Lightning's ``devices``. None: one, or as many as torchrun has started.
    use_ipex : bool
        See `nano_loop.nano`, like all options below.
    distributed_backend, process_group_backend : str
        The options.
    precision : int or str
        Lightning's names, ``"bf16"`` for ``"bf16-mixed"``, ``"bf16-products"``, or ``"auto"`` for the same.
    **others
        The other options of `nano_loop.nano`, and all arguments of Lightning's Trainer except ``strategy``.

    Attributes
    ----------
    report : SetupReport or None
        The steps that the last run applied and skipped. None before the first.
    num_processes, use_ipex, channels_last, auto_lr, cpu_for_each_process, dtype
        See `TorchNano`.

    Raises
    ------
    NanoConfigError
        If arguments are invalid.
    """

    strategy: Any
    #: The strategy, and the LightningModule of `compile`, based on the classes of the same package.
    _nano_strategy: ClassVar[Any]
    _nano_compiled: ClassVar[Any]
    _nano_lightning_module: ClassVar[type]

    def __init__(
        self,
        num_processes: int | None = None,
        use_ipex: bool = False,
        distributed_backend: str = "subprocess",
        process_group_backend: str | None = None,
        *,
        precision: Any = 32,
        **others: Any,
    ) -> None:
        _refuse(others)
        options = {name: others.pop(name) for name in [*others] if name in _OPTIONS}
        options |= {"use_ipex": use_ipex, "distributed_backend": distributed_backend}
        options |= {"process_group_backend": process_group_backend}
        options["auto_lr"] = _auto_lr(options.get("auto_lr", True))
        accelerator, devices = others.pop("accelerator", "cpu"), others.pop("devices", None)
        overriding = _of_environment()
        if overriding.get("split_batches", options.get("split_batches")):
            others.setdefault("use_distributed_sampler", False)  # the run divides each batch
        precision = overriding.get("precision", precision)
        if "num_processes" in overriding:
            num_processes, devices = overriding["num_processes"], None
        devices = _devices(accelerator, num_processes, devices)
        if precision in (PRODUCTS, "auto"):
            options["precision"], precision = precision, 32
        lightnings = _PRECISIONS.get(str(precision), precision)
        try:
            super().__init__(  # type: ignore[call-arg]
                **others,
                accelerator="cpu",
                devices=devices,
                precision=lightnings,
                strategy=self._nano_strategy(**options),
            )
        except ValueError as error:
            if not str(error).startswith(f"Precision {lightnings!r} is invalid"):
                raise
            expected = 'it must be "auto", "bf16", "bf16-products" or another of Lightning\'s names'
            hint = 'Pass "bf16" for speed, or omit it for fp32'
            raise NanoConfigError(error_message(shown("precision", precision), expected, hint)) from error

    @property
    def report(self) -> SetupReport | None:
        """The steps that the last run applied and skipped. None before the first."""
        report: SetupReport | None = self.strategy.report
        return report

    @property
    def precision(self) -> str:
        """Lightning's name for the precision, or ``"bf16-products"``."""
        return str(self.strategy.nano_precision)

    @property
    def num_processes(self) -> int:
        """The number of processes on this host."""
        return int(self.strategy.num_processes)

    @property
    def _nano_settings(self) -> Settings:  # type: ignore[override]
        settings: Settings = self.strategy.settings()
        return settings

    @classmethod
    def compile(
        cls, model: Any, loss: Any = None, optimizer: Any = None, scheduler: Any = None, metrics: Any = None
    ) -> Any:
        """Return a `LightningModule` that trains a model with a loss, an optimizer and a scheduler.

        Parameters
        ----------
        model : torch.nn.Module
            The model. It is called with all elements of a batch except the last one, which is the target. A
            `LightningModule` is returned unchanged.
        loss : callable, optional
            Called as ``loss(output, target)``. Needed for ``fit``.
        optimizer : torch.optim.Optimizer, optional
            An optimizer of the parameters of `model`. Needed for ``fit``.
        scheduler : torch.optim.lr_scheduler.LRScheduler or dict, optional
            A scheduler of `optimizer`, stepped once per epoch. A dict has Lightning's format, such as
            ``{"scheduler": scheduler, "interval": "step"}``.
        metrics : list of torchmetrics.Metric or callables, optional
            Each logged in validation and test, as ``val/Accuracy_0`` and ``test/Accuracy_0``.

        Returns
        -------
        LightningModule
            Logs ``train/loss``, ``val/loss`` and ``test/loss``. Its ``load_state_dict`` also accepts the state of the
            model alone.

        Raises
        ------
        NanoConfigError
            If an argument has the wrong type, or is given for a `LightningModule`.
        """
        if not isinstance(model, nn.Module):
            got = f"compile({type(model).__name__})"
            raise NanoConfigError(error_message(got, "it accepts a torch.nn.Module", "Pass the model"))
        if isinstance(model, cls._nano_lightning_module):
            refuse_compiled_twice(model, loss=loss, optimizer=optimizer, scheduler=scheduler, metrics=metrics)
            return model
        return cls._nano_compiled(model, loss, optimizer, scheduler, metrics)


def _refuse(others: dict[str, Any]) -> None:
    """Refuse unsupported arguments, and remove those with BigDL-Nano's defaults, which have no effect."""
    for name, (expected, hint) in _REFUSED.items():
        if name in others and (name == "strategy" or others[name]):
            raise NanoConfigError(error_message(f"Trainer({shown(name, others[name])})", expected, hint))
        others.pop(name, None)


def _of_environment() -> dict[str, Any]:
    """Return the options that are set in the environment, which override the arguments."""
    values, _ = read_options(os.environ, CHECKS)
    return {name: value for name, (_, value) in values.items()}


def _auto_lr(value: Any) -> Any:
    """Return the option, also for BigDL-Nano's ``{"warmup_epochs": 2}``."""
    if isinstance(value, Mapping):
        got, expected = f"auto_lr={dict(value)!r}", "the ramp of nano_loop takes 1,000 steps, independent of epochs"
        warnings.warn(error_message(got, expected, "Pass auto_lr=True"), NanoWarning, stacklevel=4)
        return True
    return value


def _devices(accelerator: Any, num_processes: Any, devices: Any) -> Any:
    """Return the number of processes on this host."""
    if accelerator not in ("cpu", "auto"):
        got = f"Trainer(accelerator={accelerator!r})"
        raise NanoConfigError(error_message(got, "nano_loop trains on CPUs", 'Omit it, or pass "cpu"'))
    if devices not in (None, "auto") and num_processes not in (None, devices):
        got = f"Trainer(num_processes={num_processes!r}, devices={devices!r})"
        raise NanoConfigError(error_message(got, "both are the number of processes", "Pass one of them"))
    launch = found_launch(os.environ)
    here = 1 if launch is None else local_size(launch, os.environ)
    if num_processes is None:
        return here if devices in (None, "auto") else devices
    if num_processes == "auto":
        expected = "a Trainer is built for a number of processes, which nano-loop tune does not vary"
        raise NanoConfigError(error_message('Trainer(num_processes="auto")', expected, "Pass a number"))
    Settings.read({"num_processes": num_processes})  # raises for an invalid number
    return num_processes
