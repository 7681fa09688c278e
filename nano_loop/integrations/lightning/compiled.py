"""The LightningModule that `Trainer.compile` returns, without Lightning's base class."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nano_loop.errors import NanoConfigError, NanoError, error_message

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
            # Lightning resets these after each epoch, and combines them over the ranks.
            if hasattr(metric, "compute") and hasattr(metric, "reset"):
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
