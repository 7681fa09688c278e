"""What a kernel computes is compared with torch's kernel and with fp64. A row has what is the kernel's own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Return a call whose floating tensors are in fp64."""
    if isinstance(value, Tensor):
        return value.detach().double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: in_fp64(each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(in_fp64, value))
    return type(value)(map(in_fp64, value)) if isinstance(value, tuple | list) else value


def plus(factor: float, rounding: float = 0.0) -> Callable[..., float]:
    """Allow so many of torch's errors, and a part of what is right."""
    return lambda theirs, truth, *_: factor * theirs + rounding * rms(truth)


def at_least(factor: float, rounding: float = 2**-9) -> Callable[..., float]:
    """Allow so many of torch's errors or, where torch is exact by chance on a few small numbers, one rounding."""
    return lambda theirs, truth, *_: max(factor * theirs, rounding * rms(truth))


def nothing_else(call: Any, ours: Results, torchs: Results) -> None:
    """Compare nothing but errors and shapes."""


def drawn(**numbers: Any) -> SearchStrategy[dict[str, Any]]:
    """Give arguments by name: a number from a least one to a largest, given as a tuple, or one of a list."""

    def strategy(given: Any) -> SearchStrategy[Any]:
        if isinstance(given, SearchStrategy):
            return given
        return st.sampled_from(given) if isinstance(given, list) else st.integers(*given)

    return st.fixed_dictionaries({name: strategy(given) for name, given in numbers.items()})


def pairs(least: int, largest: int) -> SearchStrategy[tuple[int, int]]:
    return st.tuples(*[st.integers(least, largest)] * 2)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kernel, and the calls of it."""

    #: Returns a call of some sizes.
    make: Callable[..., Any]
    #: Compute the results of a call, with its gradients.
    ours: Compute
    torchs: Compute
    #: As `torchs`, in fp64. It may return fewer results: the last ones are for `also`.
    exact: Compute | None = None
    error: Callable[[Tensor], float] = rms
    #: Returns how large an error may be: from torch's, what is right, the call, and the number of the result.
    bound: Callable[..., float]
    #: Asserts what else holds of a call, our results and torch's.
    also: Callable[[Any, Results, Results], None] = nothing_else
    #: What `make` takes: at random, where "threads" is their number, and by name, where random sizes do not meet it.
    sizes: SearchStrategy[dict[str, Any]]
    cases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: What `make` takes, of which the results have the same bits for these numbers of threads, or for each of them.
    large: Sequence[Mapping[str, Any]] = ()
    threads: Sequence[int] = (1, 2, 3)
    same_bits: bool = True
    #: What `make` takes, of which nothing may be written behind the memory, what computes it, and how many tensors that
    #: makes, where this is known.
    ends: Sequence[Mapping[str, Any]] = ()
    behind: Callable[[Any], Any] | None = None
    memories: int | None = None
    #: Whether the kernel computes a call, and changes of one after which torch does.
    supports: Callable[[Any], bool] = lambda call: True
    others: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    #: Make calls with numbers that are none.
    undefined: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    #: What computes. Where it uses AMX, it is tested without, too, unless it needs that. Others may stand in for it.
    kernel: Any
    needs_kernel: bool = True
    needs_amx: bool = False
    #: Places, names and values that are set for the tests.
    patches: Sequence[tuple[Any, str, Any]] = ()

    def of_fp64(self, call: Any) -> Results:
        return self.torchs(in_fp64(call)) if self.exact is None else self.exact(call)


def bounded(row: Row, call: Any, ours: Results | None = None) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield our results, those in fp64, and how large our errors may be."""
    ours, torchs, exact = row.ours(call) if ours is None else ours, row.torchs(call), row.of_fp64(call)
    assert len(ours) == len(torchs) >= len(exact)
    row.also(call, ours, torchs)
    for place, (mine, other, truth) in enumerate(zip(ours, torchs, exact, strict=False)):
        assert mine.shape == other.shape == truth.shape
        yield mine, truth, row.bound(row.error(other.double() - truth), truth, call, place)


def errors_of(row: Row, call: Any, ours: Results | None = None) -> list[tuple[float, float]]:
    """Return the errors of our results, and how large they may be."""
    return [(row.error(mine.double() - truth), bound) for mine, truth, bound in bounded(row, call, ours)]


def assert_within(found: list[tuple[float, float]]) -> None:
    for error, bound in found:
        assert error <= bound


def assert_as_exact_as_torch(row: Row, sizes: Mapping[str, Any]) -> None:
    """Hold a call of sizes that were drawn at random to its bounds. Those with a name are held by `assert_within`.

    A drawn size may have few numbers, whose error is chance, and so is torch's, of which the bound is made: of two
    thousand drawn calls, one was above its bound. Where one is, the root mean squares of sixteen seeds, in which chance
    is small, are held to theirs. A named size is the same in each run and was seen to be within its bound, so that one
    draw above it is a change of the kernel.
    """
    found = errors_of(row, row.make(**sizes))
    if "seed" in sizes and not all(error <= bound for error, bound in found):
        draws = torch.tensor([errors_of(row, row.make(**{**sizes, "seed": seed})) for seed in range(16)])
        found = draws.double().square().mean(0).sqrt().tolist()
    assert_within(found)


def assert_alike(call: Any, ours: Results, torchs: Results) -> None:
    """Compare dtypes, shapes and strides."""
    for mine, other in zip(ours, torchs, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())


def same_bits(found: Results, expected: Results) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
