"""Compares what a model computes with the same in fp64, tensor by tensor, and tells faults from rounding.

Rounding errors are random: they add up to a distance, and hardly change the length along the exact result. A fault does
one or the other by far more than autocast by hand, which rounds as often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

#: How many times autocast's own error is no fault yet: roundings in another order.
TOLERATED = 3.0
#: How far rounding may change the length along the exact result, in units in the last place.
TOLERATED_BIAS = 2.0
#: How many times the share of a random error that falls on one direction.
TOLERATED_SHARE = 6.0


@dataclass(frozen=True)
class Compared:
    """One tensor of the accelerated model, held against fp64.

    Attributes
    ----------
    name : str
        A module's output or a parameter's gradient.
    error : float
        The distance from fp64, relative to the norm there.
    error_by_hand : float
        The same for the plain model: under autocast by hand, or in fp32.
    cosine : float
        The cosine of the angle to the result in fp32.
    is_fault : bool
        Whether the error is not of rounding.
    """

    name: str
    error: float
    error_by_hand: float
    cosine: float
    is_fault: bool

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON; what is not finite is None."""
        return {key: _for_json(value) for key, value in asdict(self).items()}


def compare(traces: Sequence[Mapping[str, Tensor]], last_place: float) -> list[Compared]:
    """Compare the tensors that all four traces have, in the order of the first.

    Parameters
    ----------
    traces : sequence of mapping
        fp64 tensors of equal shapes by name: of the accelerated model, of the plain one in the same precision, in fp32,
        and in fp64.
    last_place : float
        The relative spacing of numbers in the precision, such as 2⁻⁷ for bf16.
    """
    accelerated, _, single, exact = traces
    scale = max((tensor.norm().item() for tensor in exact.values()), default=0.0)
    rows = []
    for name in [*accelerated, *(name for name in single if name not in accelerated)]:
        if any(name not in trace for trace in traces[1:]):
            continue  # a module that is called in this precision alone
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
    # A sum of large terms in the loss changes all gradients by one factor, in fp32 as well.
    tolerated = TOLERATED_BIAS * last_place + share_of_noise + TOLERATED * error_in_fp32
    biased = min(abs(share - other) for other in sound) > tolerated
    far = error > TOLERATED * error_by_hand + TOLERATED_BIAS * last_place
    lost = not math.isfinite(error) and math.isfinite(error_in_fp32)
    cosine = torch.nn.functional.cosine_similarity(accelerated, single, dim=0, eps=1e-300).item()
    return Compared(name, error, error_by_hand, cosine, bool(far or biased or lost))


def _norm_of(single: Tensor, exact: Tensor, last_place: float, scale: float) -> float:
    """Return the norm that the errors of a tensor are relative to.

    It is that of the exact tensor. Where nothing but rounding errors of larger terms is left, as in the gradient of a
    bias before a batch norm, it is `scale`, the largest norm of all. The errors in fp32 tell where that is so.
    """
    noise = (single - exact).norm().item() * last_place / torch.finfo(torch.float32).eps
    norm = exact.norm().item()
    return (scale if norm <= noise else max(norm, last_place * scale)) or 1.0


def _for_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
