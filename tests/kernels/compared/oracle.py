"""Compares the results of a kernel with torch's kernel and with fp64. A row has the kernel's own parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

Results = Sequence[Tensor | None]
Compute = Callable[[Any], Results]


def rms(tensor: Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()


def in_fp64(value: Any) -> Any:
    """Return a call with its floating tensors converted to fp64."""
    if isinstance(value, Tensor):
        return value.detach().double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: in_fp64(each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(in_fp64, value))
    return type(value)(map(in_fp64, value)) if isinstance(value, tuple | list) else value


def plus(factor: float, rounding: float = 0.0) -> Callable[..., float]:
    """Allow a multiple of torch's error plus a fraction of the exact result."""
    return lambda theirs, truth, *_: factor * theirs + rounding * rms(truth)


def at_least(factor: float, rounding: float = 2**-9) -> Callable[..., float]:
    """Allow a multiple of torch's error, or one rounding if torch happens to be exact on a few small values."""
    return lambda theirs, truth, *_: max(factor * theirs, rounding * rms(truth))


def nothing_else(call: Any, ours: Results, torchs: Results) -> None:
    """Compare only errors and shapes."""


def drawn(**numbers: Any) -> SearchStrategy[dict[str, Any]]:
    """Return a strategy for arguments by name: a tuple is a range of integers, a list has the choices."""

    def strategy(given: Any) -> SearchStrategy[Any]:
        if isinstance(given, SearchStrategy):
            return given
        return st.sampled_from(given) if isinstance(given, list) else st.integers(*given)

    return st.fixed_dictionaries({name: strategy(given) for name, given in numbers.items()})


def pairs(least: int, largest: int) -> SearchStrategy[tuple[int, int]]:
    return st.tuples(*[st.integers(least, largest)] * 2)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kernel and its calls."""

    #: Returns a call with the given sizes.
    make: Callable[..., Any]
    #: Compute the results of a call, including its gradients.
    ours: Compute
    torchs: Compute
    #: Like `torchs`, in fp64. It may return fewer results: the last ones are then only checked by `also`.
    exact: Compute | None = None
    error: Callable[[Tensor], float] = rms
    #: Returns the error bound, from torch's error, the exact result, the call, and the index of the result.
    bound: Callable[..., float]
    #: Asserts further properties of a call, our results and torch's.
    also: Callable[[Any, Results, Results], None] = nothing_else
    #: Arguments of `make`: random, with "threads" as the number of threads, and named cases that random sizes miss.
    sizes: SearchStrategy[dict[str, Any]]
    cases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Arguments of `make` whose results have the same bits for these numbers of threads, or for each of them.
    large: Sequence[Mapping[str, Any]] = ()
    threads: Sequence[int] = (1, 2, 3)
    same_bits: bool = True
    #: Arguments of `make` for checks that nothing is written past the end of memory, the function that computes, and
    #: the number of tensors it allocates, if known.
    ends: Sequence[Mapping[str, Any]] = ()
    behind: Callable[[Any], Any] | None = None
    memories: int | None = None
    #: Whether the kernel supports a call, and changes of a call after which it does not.
    supports: Callable[[Any], bool] = lambda call: True
    others: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    #: Make calls with NaN.
    undefined: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    #: The kernel. If it uses AMX, it is also tested without. If not needed, others may replace it.
    kernel: Any
    needs_kernel: bool = True
    #: Objects, names and values that are patched for the tests.
    patches: Sequence[tuple[Any, str, Any]] = ()

    def of_fp64(self, call: Any) -> Results:
        return self.torchs(in_fp64(call)) if self.exact is None else self.exact(call)


def errors_of(row: Row, call: Any, ours: Results | None = None) -> list[tuple[float, float]]:
    ours, torchs, exact = row.ours(call) if ours is None else ours, row.torchs(call), row.of_fp64(call)
    assert len(ours) == len(torchs) >= len(exact)
    row.also(call, ours, torchs)
    found = []
    for place, (mine, other, truth) in enumerate(zip(ours, torchs, exact, strict=False)):
        assert mine.shape == other.shape == truth.shape
        bound = row.bound(row.error(other.double() - truth), truth, call, place)
        found.append((row.error(mine.double() - truth), bound))
    return found


def assert_within(found: list[tuple[float, float]]) -> None:
    for error, bound in found:
        assert error <= bound


def assert_as_exact_as_torch(row: Row, sizes: Mapping[str, Any]) -> None:
    """Check that the errors of a call are within their bounds, with several seeds for random sizes.

    A random size may have few values, so that our error and torch's, which the bound is based on, are partly chance: of
    two thousand random calls, one was above its bound. In that case, root mean squares over sixteen seeds are compared
    instead. A named size is the same in each run and is known to be within its bound, so exceeding it is a change of
    the kernel.
    """
    found = errors_of(row, row.make(**sizes))
    if "seed" in sizes and not all(error <= bound for error, bound in found):
        draws = torch.tensor([errors_of(row, row.make(**{**sizes, "seed": seed})) for seed in range(16)])
        found = draws.double().square().mean(0).sqrt().tolist()
    assert_within(found)


def assert_alike(call: Any, ours: Results, torchs: Results) -> None:
    for mine, other in zip(ours, torchs, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())


def same_bits(found: Results, expected: Results) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
