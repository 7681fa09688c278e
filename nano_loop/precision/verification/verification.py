"""Compares an accelerated model with the plain one, on copies, tensor by tensor, and separates faults from rounding.

Rounding errors are random: they add up to a distance, but hardly change the length along the exact result. A fault
changes one of them by far more than plain autocast, which rounds as often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from nano_loop.config.precisions import PRECISIONS, PrecisionKind
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.patching.members import buffers_of, parameters_of
from nano_loop.patching.nested_tensors import map_tensors
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
from nano_loop.runtime.objects.called_functions import variables_kept
from nano_loop.runtime.objects.report import SetupReport

#: Maximum number of lines of each table in the text.
_MOST_LINES = 8
#: The tolerated multiple of autocast's own error, for roundings in another order.
TOLERATED = 3.0
#: The tolerated change of the length along the exact result by rounding, in units in the last place.
TOLERATED_BIAS = 2.0
#: The tolerated multiple of the share of a random error in one direction.
TOLERATED_SHARE = 6.0

#: Called with a model and a batch. Returns the loss.
LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Compared:
    """A tensor of the accelerated model, compared with fp64.

    Attributes
    ----------
    name : str
        The name of a module's output or a parameter's gradient.
    error : float
        The distance from the fp64 tensor, relative to its norm.
    error_by_hand : float
        The same for the plain model, under plain autocast or in fp32.
    cosine : float
        The cosine similarity to the result in fp32.
    is_fault : bool
        Whether rounding does not explain the error.
    """

    name: str
    error: float
    error_by_hand: float
    cosine: float
    is_fault: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON, with None for values that are not finite."""
        return {key: _for_json(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes
    ----------
    outputs : tuple of Compared
        The outputs of the modules, in the order of their calls.
    gradients : tuple of Compared
        The gradients of the parameters, in the order of the backward: the last layer first.
    loss : Compared
        The loss; with ``verify=True``, the mean square of the outputs.
    remark : str
        The limits of the comparison, or an empty string.
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
        """The first difference, such as ``"the output of encoder.0"`` or ``"the gradient of head.weight"``, or None."""
        for kind, rows in (("the output of", self.outputs), ("the gradient of", self.gradients)):
            for row in rows:
                if row.is_fault:
                    return f"{kind} {row.name}"
        return "the loss" if self.loss.is_fault else None

    @property
    def ok(self) -> bool:
        """Whether rounding explains all errors."""
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
    """Compare the loss, outputs and gradients of a model: accelerated, by hand, in fp32 and in fp64.

    `acceleration` returns a context in which a copy is accelerated, which yields the run; for the rest, see
    `nano_loop.verify`.
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

    # verify may be called with gradients disabled or under autocast.
    kept = tensors_kept(chain(parameters_of(model), buffers_of(model)))
    with (
        random_states_kept() as restore,
        variables_kept(model),
        kept,
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        single = trace(copied(model), step)
        if not single.gradients:
            got = "loss_fn computed no gradient of the model's parameters"
            hint = "Call the model that is passed to loss_fn: it is a copy"
            raise NanoConfigError(error_message(got, "verify compares them", hint))
        made = copied(model)
        with acceleration(made) as run:
            accelerated = trace(made, step)
            applied, skipped = ((), ()) if run.report is None else (run.report.applied, run.report.skipped)
            if kind.products is not None and "precision" in skipped:
                kind = _FP32
        try:
            hand = by_hand_in("channels_last" in applied)
        except RuntimeError:  # a view that NHWC does not allow; the step replaces it by a reshape
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
_RANDOM = "The model draws random numbers outside dropout modules, so they may differ between precisions."


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
        expected = "it must return the loss of the model, a tensor of one element with a gradient"
        raise NanoConfigError(error_message(told, expected, _WRITE))
    return loss


def _marked(row: Compared) -> str:
    return f"{row.name}  <- not rounding" if row.is_fault else row.name


def compare(traces: Sequence[Mapping[str, Tensor]], last_place: float) -> list[Compared]:
    """Compare the tensors that are in all four traces, in the order of the first.

    The traces have fp64 tensors of equal shapes by name: of the accelerated model, and of the plain one in the same
    precision, in fp32, and in fp64. `last_place` is the relative spacing of values in the precision, such as 2⁻⁷ for
    bf16.
    """
    accelerated, _, single, exact = traces
    scale = max((tensor.norm().item() for tensor in exact.values()), default=0.0)
    rows = []
    for name in [*accelerated, *(name for name in single if name not in accelerated)]:
        if any(name not in trace for trace in traces[1:]):
            continue  # the module is called only in this precision
        if name not in accelerated or accelerated[name].shape != exact[name].shape:
            rows.append(Compared(name, math.inf, 0.0, 0.0, True))
        else:
            rows.append(_compared(name, [trace[name].flatten() for trace in traces], last_place, scale))
    return rows


def _compared(name: str, tensors: Sequence[Tensor], last_place: float, scale: float) -> Compared:
    accelerated, hand, single, exact = tensors
    norm = _norm_of(single, exact, last_place, scale)
    error, error_by_hand, error_in_fp32 = (
        (tensor - exact).norm().item() / norm for tensor in (accelerated, hand, single)
    )
    share, *sound = ((tensor @ exact).item() / norm**2 for tensor in (accelerated, hand, exact))
    share_of_noise = TOLERATED_SHARE * error_by_hand / math.sqrt(exact.numel())
    # Rounding a sum of large terms in the loss scales all gradients by one factor, even in fp32.
    tolerated = TOLERATED_BIAS * last_place + share_of_noise + TOLERATED * error_in_fp32
    biased = min(abs(share - other) for other in sound) > tolerated
    far = error > TOLERATED * error_by_hand + TOLERATED_BIAS * last_place
    lost = not math.isfinite(error) and math.isfinite(error_in_fp32)
    cosine = torch.nn.functional.cosine_similarity(accelerated, single, dim=0, eps=1e-300).item()
    return Compared(name, error, error_by_hand, cosine, bool(far or biased or lost))


def _norm_of(single: Tensor, exact: Tensor, last_place: float, scale: float) -> float:
    """Return the reference norm for the errors of a tensor.

    It is the norm of the exact tensor. If the tensor consists only of rounding errors of larger terms, as the gradient
    of a bias before a batch norm, it is `scale`, the largest norm of all. The errors in fp32 show whether that is so.
    """
    noise = (single - exact).norm().item() * last_place / torch.finfo(torch.float32).eps
    norm = exact.norm().item()
    return (scale if norm <= noise else max(norm, last_place * scale)) or 1.0


def _for_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
