"""Checksums of parameters, by which ranks detect that their parameters are no longer equal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from nano_loop.distributed.comm.raw_bytes import raw_tensor, resolved
from nano_loop.distributed.data_parallel.initial_sync import Named
from nano_loop.errors import NanoWorkerError, error_message

#: A sum and a norm.
Pair = tuple[float, float]

EVERY = 100  # averagings between two checks: reading all parameters then costs less than 0.1% of the time
FIRST = 10  # averagings before the third check, for shorter runs
_TOLERANCE = 1e-4  # of a norm; ranks with different numbers of threads round differently, by 1e-7 per step

_ULPS = 4  # of a norm in bf16: rounding errors of a sum grow with the square root of the number of elements
_OF_SUM = 1e-6  # of a sum, which ranks with different numbers of threads add in a different order

_ADVICE = (
    "Change parameters in the same way on every rank: load a checkpoint on all of them, take decisions that depend on "
    "a rank's own loss from the mean or from rank 0, call a model whose first call sets parameters once before the "
    "run, and in place of an embedding's max_norm renorm the rows after optimizer.step(). Or pass "
    "compare_parameters=False"
)


def is_due(averagings: int) -> bool:
    """Whether the parameters are compared at this averaging: calls or a first step may have made them differ."""
    return averagings in (0, 1, FIRST) or averagings % EVERY == 0


def checksums(parameters: Iterable[torch.Tensor | None]) -> list[Pair]:
    """Return the sum and the norm of each parameter."""
    with torch.no_grad():
        return [sum_and_norm(parameter) for parameter in parameters]


def sum_and_norm(tensor: torch.Tensor | None) -> Pair:
    """Return the sum and the norm of all elements; 0 for a missing or empty tensor."""
    if tensor is None or not tensor.numel():
        return 0.0, 0.0
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    elif values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    elif not values.is_floating_point() or values.dtype.itemsize == 1:
        try:
            values = values.double()
        except RuntimeError:  # bits, integers below 8 bits, and float4, which torch cannot convert
            values = raw_tensor(resolved(values)).double()
    # Sums in fp32 are 15 times as fast as in float64, to which torch first converts.
    dtype = torch.float64 if values.dtype is torch.float64 else torch.float32
    return float(values.sum(dtype=dtype)), float(torch.linalg.vector_norm(values, dtype=dtype))


def gradient_checksum(parameters: Sequence[torch.Tensor]) -> Pair:
    """Return a sum and a norm of the gradients of `parameters`, each weighted by a different factor."""
    total = norm = 0.0
    for factor, parameter in enumerate(parameters, start=1):
        sum_, length = sum_and_norm(parameter.grad)
        total, norm = total + factor * sum_, norm + factor * length
    return total, norm


def rates_of(optimizers: Iterable[Optimizer]) -> tuple[float, ...]:
    """Return the learning rates of all groups; NaN for a group without one."""
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    return tuple(float(rate) if isinstance(rate, (int, float, torch.Tensor)) else math.nan for rate in rates)


def norm_of_gradients(parameters: Iterable[torch.Tensor]) -> float:
    """Return the norm of all gradients of `parameters` together."""
    return math.hypot(*(sum_and_norm(parameter.grad)[1] for parameter in parameters))


def first_unequal(gathered: Sequence[Sequence[Pair]], named: Sequence[Named]) -> tuple[str, int, str] | None:
    """Return the first tensor that is not equal on all ranks: its name, a differing rank, and the difference."""
    for (name, tensor), *pairs in zip(named, *gathered, strict=False):
        for rank, pair in enumerate(pairs):
            if not are_equal(pair, pairs[0], tensor.dtype):
                place = 1 if pair[1] != pairs[0][1] else 0
                values = f"{pairs[0][place]:.6g} on rank 0, and {pair[place]:.6g} on rank {rank}"
                return name, rank, f"its {('sum', 'norm')[place]} is {values}"
    return None


def refuse_unequal(gathered: Sequence[Sequence[Pair]], parameters: Sequence[Named]) -> None:
    """Raise a `NanoWorkerError` that names the first parameter that is not equal on all ranks; see `first_unequal`."""
    unequal = first_unequal(gathered, parameters)
    if unequal is not None:
        name, rank, how = unequal
        got = f"{name} is not the same on all ranks: {how}"
        raise NanoWorkerError(error_message(got, "all ranks must train the same model", _ADVICE), rank=rank)


def are_equal(one: Pair, other: Pair, dtype: torch.dtype) -> bool:
    """Whether two sums and norms are equal up to rounding; NaN equals NaN."""
    rounds = dtype.is_floating_point or dtype.is_complex
    # torch does not train in 8 bits or less: such tensors were rounded from a wider dtype.
    wide = dtype if dtype.itemsize > 1 else torch.bfloat16
    relative = max(_TOLERANCE, _ULPS * torch.finfo(wide).eps) if rounds else 0.0
    bound = relative * max(one[1], other[1]) + _OF_SUM * abs(one[0]) * rounds
    return all(
        left == right or (math.isnan(left) and math.isnan(right)) or abs(left - right) <= bound < math.inf
        for left, right in zip(one, other, strict=True)
    )
