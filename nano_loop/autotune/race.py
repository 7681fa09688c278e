"""Which algorithm computes a call of a run: the race between its algorithms, the key of its times, and the choices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nano_loop.autotune.tuner import Algorithm, Race, Tuner
from nano_loop.kernels.memory import UnsupportedTensorError
from nano_loop.kernels.override import KEPT, REFERENCE, ROUNDED, TORCH, Call, Compute
from nano_loop.patching.torch_private import in_mode
from nano_loop.patching.torch_private_autograd import in_backward
from nano_loop.patching.walk import find

#: The required accuracy and speedup of algorithms, by `Call.numbers_in`.
_TERMS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {},
    # Both sum many values with rounding. Choosing an algorithm costs some microseconds in Python that torch's kernel
    # alone would not need; in a training step twice as many as in a tight loop, because caches are cold.
    "fp32": {"bound": 2.0**-12, "torchs_is_beaten": True, "overhead": 20e-6},
    # Errors are largest for sums of few values or with cancellation. In a training step, where inputs and results are
    # not cached, rounding gains less than when it is repeated.
    ROUNDED: {"bound": 2.0**-5, "torchs_is_beaten": True, "pays": 1.2},
    KEPT: {"bound": 2.0**-5, "torchs_is_beaten": True, "pays": 1.0},
}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def kind_of(call: Call) -> Hashable:
    """Return a key that is equal for calls that use the same algorithm."""
    return call.operator, call.numbers_in, _kind(call.tensors), _kind(call.numbers), call.leaves


def _kind(values: Sequence[Any]) -> Hashable:
    return tuple(
        [
            (value.shape, value.stride(), value.dtype)
            if isinstance(value, Tensor)
            else tuple(value)
            if isinstance(value, (list, tuple))
            else value != 0
            if isinstance(value, float)
            else value
            for value in values
        ]
    )


def key_of(call: Call) -> str:
    """Return a description of what determines a call's fastest algorithm, excluding the exact batch size."""
    first: Tensor = call.tensors[0]
    outermost = max(range(first.dim()), key=first.stride, default=0)
    rough = {first.size(dimension) for dimension in call.rough or (outermost,)}
    words = [word for value in (*call.tensors, *call.numbers) for word in _in_words(value, rough)]
    return " ".join(map(str, (_numbers_in(call), call.operator, *words)))


def _in_words(value: Any, rough: set[int]) -> Iterator[object]:
    if isinstance(value, Tensor):
        yield "x".join(bucket(size) if size in rough else str(size) for size in value.shape)
        yield layout(value)
    elif not isinstance(value, float):
        yield "-" if value is None else str(value).replace(" ", "")


def bucket(count: int) -> str:
    """Return a string that is equal for similar counts, within a factor of two."""
    return f"2^{max(count - 1, 0).bit_length()}"


def layout(tensor: Tensor) -> str:
    """Return the memory layout: contiguous, with the second dimension last, or neither."""
    if tensor.is_contiguous():
        return "C"
    return "L" if tensor.dim() > 1 and tensor.movedim(1 if tensor.dim() > 2 else 0, -1).is_contiguous() else "S"


def race_of(call: Call, algorithms: Mapping[str, Compute]) -> Race | None:
    """Return the race between the algorithms of a call, which share its memory, or None if it is not to be measured."""
    timed = call.timed(call) if call.timed is not None else call if call.is_measurable else None
    if timed is None:
        return None
    gradients: dict[torch.Size, Tensor] = {}
    race = {name: _timed(timed, compute, gradients) for name, compute in algorithms.items() if name != REFERENCE}
    in_fp32, reference = algorithms.get(REFERENCE), None
    if in_fp32 is not None and len(race) > 1:
        own = [race[name] for name in race if name != TORCH and algorithms[name] is in_fp32]
        reference = own[0] if own else _timed(timed, in_fp32, gradients, torch.float32)
    return Race(race, TORCH, reference, **_TERMS[_numbers_in(call)]) if len(race) > 1 else None


def _numbers_in(call: Call) -> str:
    return call.numbers_in or _NAMES[call.tensors[0].dtype]


def _timed(
    call: Call, compute: Compute, gradients: dict[torch.Size, Tensor], dtype: torch.dtype | None = None
) -> Algorithm:
    """Return a function that computes a call and its leaves' gradients, optionally from tensors of another dtype."""

    def algorithm() -> Sequence[Tensor]:
        tensors: list[Any] = [tensor if tensor is None else _as_input(tensor, dtype) for tensor in call.tensors]
        leaves = [tensor.requires_grad_() for tensor in tensors[: call.leaves]]
        with torch.set_grad_enabled(bool(leaves)), saved_tensors_hooks(_same, _same):  # bypasses the loop's own hooks
            results = compute(call._replace(tensors=(*tensors,)))
            if results is None:
                raise UnsupportedTensorError(f"{call.operator} is left to torch")
            if not leaves:
                return [*find(Tensor, results)]
            out: Tensor = next(iter(find(Tensor, results)))
            if out.shape not in gradients:
                gradients[out.shape] = _gradient_of(out)
            return [out.detach(), *torch.autograd.grad(out, leaves, gradients[out.shape].to(out.dtype))]

    return algorithm


def _as_input(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach() if dtype is None or not tensor.is_floating_point() else tensor.detach().to(dtype)


def _same(tensor: Any) -> Any:
    return tensor


def _gradient_of(out: Tensor) -> Tensor:
    """Return a gradient of an output, with different values in each row."""
    if not out.dim():
        return torch.ones((), dtype=torch.float32, device="cpu")
    row = torch.linspace(-1, 1, out.size(-1), dtype=torch.bfloat16, device="cpu").sin_()
    return row.expand(out.shape).contiguous()


#: Maximum number of kinds of calls to remember: a loop may have a new shape in each batch.
_MOST_KINDS = 1024


class Generation:
    """The algorithms of calls from one turn of the tuner to the next. All calls of a kind use that of the first call.

    The interceptors of a run have the latest generation in their rules, so a backward uses that of its forward: a
    recomputation matches the original even if another optimizer has stepped in between, as in a GAN.

    `settled` has the algorithms of kinds that an earlier generation has measured.
    """

    def __init__(self, tuner: Tuner, settled: Mapping[Hashable, str] | None = None) -> None:
        self._tuner = tuner
        self._settled: dict[Hashable, str] = dict(settled or {})
        self._guessed: dict[Hashable, str] = {}

    def next(self) -> Generation:
        """Return the next generation, which tries again to measure kinds that use the default."""
        return Generation(self._tuner, self._settled)

    def algorithm(self, call: Call, algorithms: Callable[[], Mapping[str, Compute]], guess: str) -> str:
        """Return the name of the algorithm for a call; see `nano_loop.kernels.override.choose`."""
        if torch.are_deterministic_algorithms_enabled():
            return guess
        kind = kind_of(call)
        known = self._settled.get(kind) or self._guessed.get(kind)
        return self._first(kind, call, algorithms(), guess) if known is None else known

    def _first(self, kind: Hashable, call: Call, algorithms: Mapping[str, Compute], guess: str) -> str:
        race = race_of(call, algorithms)
        chosen: str | None = guess
        if race is not None:
            key = key_of(call)
            stored = self._tuner.choices.get(key)
            if stored is not None:
                chosen = stored.algorithm
            # An activation checkpoint may repeat a call with gradients, so do not measure it within a backward.
            elif in_mode() or torch.is_inference_mode_enabled() or (call.leaves and in_backward()):
                chosen = None
            else:
                chosen = self._tuner.choose(key, guess, lambda: race)
            if chosen is not None and chosen not in race.algorithms:  # a choice of another version
                chosen = guess
        if len(self._settled) + len(self._guessed) >= _MOST_KINDS:
            self._settled.clear()
            self._guessed.clear()
        (self._guessed if chosen is None else self._settled)[kind] = guess if chosen is None else chosen
        return guess if chosen is None else chosen
