"""What a comparison of an accelerated model with the plain one has found, and how it is computed, on copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from nano_loop.config.precisions import PRECISIONS, PrecisionKind
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.patching.members import buffers_of, parameters_of
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.precision.verification.comparison import Compared, compare
from nano_loop.precision.verification.traces import (
    Trace,
    backward_into,
    by_hand,
    copied,
    in_fp64,
    random_states_kept,
    tensors_kept,
    traced,
)
from nano_loop.runtime.objects.report import SetupReport

#: How many lines the text has of each table.
_MOST_LINES = 8

#: Takes a model and a batch, and returns the loss.
LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Verification:
    """What `verify` has found.

    Attributes
    ----------
    outputs : tuple of Compared
        The outputs of the modules, in the order of their calls.
    gradients : tuple of Compared
        The gradients of the parameters, in the order of the backward: the last layer first.
    loss : Compared
        The loss; of ``verify=True``, the mean square of the outputs.
    remark : str
        What the comparison leaves out, or an empty string.
    setup : SetupReport or None
        The report of the accelerated run.
    """

    outputs: tuple[Compared, ...]
    gradients: tuple[Compared, ...]
    loss: Compared
    remark: str
    setup: SetupReport | None

    @property
    def fault(self) -> str | None:
        """Where the models part first: ``"the output of encoder.0"`` or ``"the gradient of head.weight"``, or None."""
        for kind, rows in (("the output of", self.outputs), ("the gradient of", self.gradients)):
            for row in rows:
                if row.is_fault:
                    return f"{kind} {row.name}"
        return "the loss" if self.loss.is_fault else None

    @property
    def ok(self) -> bool:
        """Whether all errors are of rounding."""
        return self.fault is None

    def summary(self) -> str:
        """Return one line."""
        if self.fault is not None:
            return f"{self.fault} is off by more than rounding"
        rows = [*self.outputs, *self.gradients, self.loss]
        worst = max(rows, key=lambda row: row.error)
        return f"errors up to {worst.error:.1e} ({worst.name}), by hand up to {max(r.error_by_hand for r in rows):.1e}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain lists, dicts, strings and numbers, for JSON."""
        return {
            "ok": self.ok,
            "fault": self.fault,
            "remark": self.remark,
            "loss": self.loss.as_dict(),
            "outputs": [row.as_dict() for row in self.outputs],
            "gradients": [row.as_dict() for row in self.gradients],
        }

    def __str__(self) -> str:
        lines = [self.summary(), *([self.remark] if self.remark else [])]
        for title, rows in (("outputs", self.outputs), ("gradients", self.gradients)):
            shown = sorted(rows, key=lambda row: (not row.is_fault, -row.error))[:_MOST_LINES]
            lines.append(f"{title}: the {len(shown)} largest errors of {len(rows)}")
            lines.append(f"  {'error':>8}  {'by hand':>8}  {'cosine':>8}  ")
            lines += [f"  {r.error:8.1e}  {r.error_by_hand:8.1e}  {r.cosine:8.6f}  {_marked(r)}" for r in shown]
        return "\n".join(lines)


def verified(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    kind: PrecisionKind,
    acceleration: Callable[[nn.Module], AbstractContextManager[Any]],
) -> Verification:
    """Compute loss, outputs and gradients of a model accelerated, by hand, in fp32 and in fp64, and compare them.

    Parameters
    ----------
    model : torch.nn.Module
        The model. It is not changed, and neither are the states of random generators.
    loss_fn, batch
        See `nano_loop.verify`.
    kind : PrecisionKind
        The precision of the accelerated model.
    acceleration : callable
        Takes a copy of the model, and accelerates it inside a context, which yields the run.

    Raises
    ------
    NanoConfigError
        If the model cannot be copied, or `loss_fn` does not compute a loss of the model it gets.
    """

    def step(made: nn.Module, inputs: Any = batch) -> Tensor:
        loss = _loss(made, loss_fn, inputs)
        backward_into(made, loss)
        return loss

    def trace(made: nn.Module, call: Callable[[nn.Module], Tensor]) -> Trace:
        restore()
        return traced(made, call)

    def by_hand_in(channels_last: bool) -> Trace:
        with by_hand(copied(model), kind, channels_last=channels_last) as made:
            return trace(made, step)

    # An optimizer may step, and a test may verify, without gradients or under autocast.
    kept = tensors_kept(chain(parameters_of(model), buffers_of(model)))
    with random_states_kept() as restore, kept, torch.enable_grad(), torch.autocast("cpu", enabled=False):
        single = trace(copied(model), step)
        if not single.gradients:
            got = "loss_fn computed no gradient of the model's parameters"
            hint = "Call the model that loss_fn gets: it is a copy"
            raise NanoConfigError(error_message(got, "verify compares them", hint))
        made = copied(model)
        with acceleration(made) as run:
            accelerated = trace(made, step)
            applied, skipped = ((), ()) if run.report is None else (run.report.applied, run.report.skipped)
            if kind.products is not None and "precision" in skipped:
                kind = _FP32
        try:
            hand = by_hand_in("channels_last" in applied)
        except RuntimeError:  # a view that NHWC does not allow, which the step makes a reshape
            hand = by_hand_in(False)
        with in_fp64(copied(model)) as made:
            exact = trace(made, lambda model: step(model, map_tensors(_in_fp64, batch)))
        torch.manual_seed(1)
        other = traced(copied(model), step)
    last_place = max(torch.finfo(kind.autocast_by_hand or kind.compute).eps, torch.finfo(torch.float32).eps)
    traces = accelerated, hand, single, exact
    outputs, gradients, loss = (
        compare([getattr(trace, name) for trace in traces], last_place) for name in ("outputs", "gradients", "loss")
    )
    differs = not torch.equal(other.loss["loss"], single.loss["loss"])
    return Verification(tuple(outputs), tuple(gradients), loss[0], _RANDOM if differs else "", run.report)


_FP32 = PRECISIONS["32-true"]
_TAKES = "it takes the model and the batch, not outputs and targets like torch's losses"
_WRITE = "Write loss_fn(model, batch), such as lambda model, batch: mse_loss(model(batch[0]), batch[1])"
_RANDOM = "The model draws random numbers besides dropout modules, so other precisions may compute with others."


def _in_fp64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _loss(model: nn.Module, loss_fn: LossFunction, batch: Any) -> Tensor:
    inputs = map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), batch)
    modules, called = {*map(id, model.modules())}, False

    def note(module: nn.Module, _: Any) -> None:
        nonlocal called
        called = called or id(module) in modules

    hook = register_module_forward_pre_hook(note)
    try:
        loss: Any = loss_fn(model, inputs)
    except Exception as error:
        if called:
            raise
        told = f"loss_fn raised {type(error).__name__} before it called the model"
        raise NanoConfigError(error_message(told, _TAKES, _WRITE)) from error
    finally:
        hook.remove()
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        told = f"loss_fn returned {type(loss).__name__}"
        expected = "it returns the loss of the model, a tensor of one element with a gradient"
        raise NanoConfigError(error_message(told, expected, _WRITE))
    return loss


def _marked(row: Compared) -> str:
    return f"{row.name}  <- not of rounding" if row.is_fault else row.name
