"""A Trainer with BigDL-Nano's arguments, nano_loop's options and `compile`, without Lightning's base classes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from nano_loop.config.declarations import CHECKS, OPTIONS
from nano_loop.config.environment import read_options
from nano_loop.config.leftovers import REMOVED
from nano_loop.distributed.launch_external.environment import found_launch, local_size
from nano_loop.errors import NanoConfigError, NanoWarning, error_message, shown
from nano_loop.integrations.lightning.compiled import refuse_compiled_twice
from nano_loop.integrations.lightning.strategy import PRODUCTS
from nano_loop.runtime.objects.report import SetupReport
from nano_loop.runtime.settings import OptionAttributes, Settings

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
