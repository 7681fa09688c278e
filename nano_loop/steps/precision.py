"""Runs the models under bf16 autocast. Parameters, gradients and model outputs stay fp32."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nano_loop.cpu import Machine
from nano_loop.distributed.ranks import ALONE, Ranks
from nano_loop.errors import NanoWarning, problem
from nano_loop.intercept.calls import Call, Entries, Entry, Layer, is_forward
from nano_loop.intercept.nested import map_tensors, shares_memory
from nano_loop.options import Options
from nano_loop.parts import Parts
from nano_loop.precision.autocast import bf16_autocast, to_fp32
from nano_loop.report import StepResult
from nano_loop.steps.step import Step


class Precision(Step):
    """Enters autocast for each outermost call into a model, and exits it when the call returns.

    Autocast caches bf16 copies of the weights until it exits, so a single autocast around the whole loop would keep
    using the weights of the first step. In methods other than ``forward``, which may change the weights or contain the
    whole loop, the cache is disabled.
    """

    name = "precision"
    required = False

    def __init__(self, config: Options, machine: Machine, entries: Entries, ranks: Ranks = ALONE) -> None:
        super().__init__(config, machine, entries, ranks)
        self._entries_of: dict[int, tuple[nn.Module, Entry]] = {}  # by the id of a model
        self._missed: list[str] = []

    @property
    def asked(self) -> bool:
        """See `Step.asked`."""
        return self.config.reduced_precision or self.config.auto_precision

    def skip_reason(self, parts: Parts) -> str | None:
        """See `Step.skip_reason`."""
        if not self.config.reduced_precision:
            return "fp32, since this CPU has no bf16 instructions"
        if parts.models and all(map(_is_meta, parts.models)):
            return "the model's parameters are on the meta device, where nothing is computed"
        return None

    def apply(self, parts: Parts) -> str:
        """See `Step.apply`."""
        if not self.machine.has_fast_bf16:
            self._warn()
        for model in parts.models:
            self._entries_of[id(model)] = model, self.entries.add(model, self.name, _under_autocast(_bf16_state(model)))
        for optimizer in parts.optimizers:
            self.undoing.callback(optimizer.register_step_post_hook(self._look).remove)
        return "bf16 autocast, outputs fp32"

    def closing(self) -> StepResult | None:
        """Return a result that names the models that were trained without an intercepted call, or None."""
        names = ", ".join(self._missed)
        return (
            StepResult(self.name, "skipped", f"{names} was called by code compiled before the run") if names else None
        )

    def _look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Warn about a model that this optimizer trains and whose calls were not intercepted."""
        for model, entry in self._entries_of.values():
            name = type(model).__name__
            if entry.was_called or name in self._missed or not _is_trained(model, optimizer):
                continue
            self._missed.append(name)
            given = f"{name} is trained in fp32, because nano_loop intercepted no call of it"
            cause = "a function that was compiled before the run bypasses the steps"
            warnings.warn(problem(given, cause, _COMPILE_LATER), NanoWarning, stacklevel=2)

    def undo(self) -> None:
        """See `Step.undo`."""
        super().undo()
        self._entries_of.clear()
        self._missed.clear()

    def _warn(self) -> None:
        given = f"{self.config.given['precision']} on {self.machine.name}"
        lack = "this CPU has no bf16 instructions, so bf16 will be slower than fp32"
        warnings.warn(problem(given, lack, 'Use precision="auto"'), NanoWarning, stacklevel=2)


_COMPILE_LATER = "Compile it inside the run, or call torch.compiler.reset() before the run"


def _is_meta(model: nn.Module) -> bool:
    parameters = list(model.parameters())
    return bool(parameters) and all(parameter.is_meta for parameter in parameters)


def _is_trained(model: nn.Module, optimizer: Optimizer) -> bool:
    held = {id(each) for group in optimizer.param_groups for each in group["params"] if each.grad is not None}
    return any(id(parameter) in held for parameter in model.parameters())


def _bf16_state(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers that are bf16 before the run, as in the plain loop."""
    state = itertools.chain(model.parameters(), model.buffers())
    return [tensor for tensor in state if tensor.dtype is torch.bfloat16]


def _under_autocast(state: list[Tensor]) -> Layer:
    def outward(tensor: Tensor) -> Tensor:
        return tensor if any(shares_memory(tensor, each) for each in state) else to_fp32(tensor)

    def layer(call: Call) -> Call:
        def with_autocast(function: Call, *args: Any, **kwargs: Any) -> Any:
            # An autocast or a `disable_casts` of the user takes precedence, as in the plain loop.
            if torch.is_autocast_enabled("cpu"):
                return call(function, *args, **kwargs)
            with bf16_autocast(keep_casts=is_forward(function)):
                outputs = call(function, *args, **kwargs)
            return map_tensors(outward if state else to_fp32, outputs)

        return with_autocast

    return layer
