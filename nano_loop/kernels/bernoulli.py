"""Draws the same random masks as torch's CPU generator, about ten times as fast.

torch's `Tensor.bernoulli_` draws two Mersenne Twister outputs per element, one element at a time. Here, a C function
(``bernoulli.c``) reads the generator's state, makes the same draws with vector instructions, and writes back the state
that torch would have left. So all later random numbers are the same as well.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.drawing_order import drawn
from nano_loop.kernels.memory import BYTES, DENSE, Pointer, attempt, empty
from nano_loop.patching.operators import overridden
from nano_loop.patching.patch_table import shared_change, users

#: Minimum number of elements. Below it, copying the state takes longer than the gain.
MIN_ELEMENTS = 1 << 12

# The bit patterns of 1.
_ONES = {
    **dict.fromkeys((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), 1),
    torch.float16: 0x3C00,
    torch.bfloat16: 0x3F80,
    torch.float32: 0x3F800000,
    torch.float64: 0x3FF0000000000000,
}
# Byte offsets in torch's generator state: of the count of numbers left, of the position, and of 624 64-bit integers.
_STATE_SIZE, _LEFT, _NEXT, _NUMBERS = 5056, 8, 16, 24
_WORDS = 624
_lock = threading.Lock()  # only one thread at a time may read, advance and restore a state


class _Kernel(CompiledKernel):
    @functools.cached_property
    def unavailable(self) -> str | None:
        reason = super().unavailable
        return reason or (None if _draws_as_torch() else "torch draws masks with a different generator here")


#: Calls take microseconds.
KERNEL = _Kernel("bernoulli", {"draw_bernoulli": (BYTES, Pointer(tuple(_ONES), DENSE))}, is_threaded=False)


@contextmanager
def vectorized_draws() -> Iterator[None]:
    """Draw the masks of `torch.Tensor.bernoulli_` by `fill`."""
    with shared_change(vectorized_draws, nullcontext), same_draws():
        yield


def same_draws() -> AbstractContextManager[None]:
    """Return a context in which `replacement` replaces the kernel of `torch.Tensor.bernoulli_`."""
    return overridden("bernoulli_.float", replacement, "CPU")


def replacement(original: Callable[..., torch.Tensor] | None) -> Callable[..., torch.Tensor]:
    """Return the replacement of ``aten::bernoulli_.float``, which makes the same draws, given torch's, if one does."""

    def bernoulli_(
        keys: torch.DispatchKeySet, tensor: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        return drawn(tensor, generator, lambda plain: fill_plainly(keys, plain, p, generator), is_mask=True)

    def fill_plainly(
        keys: torch.DispatchKeySet, tensor: torch.Tensor, p: float, generator: torch.Generator | None
    ) -> torch.Tensor:
        if users(vectorized_draws) and _supports(tensor, p, generator):
            filled = attempt(fill, tensor, p, generator or torch.default_generator)
            if filled is not None:
                return filled
        if original is not None:
            return original(keys, tensor, p, generator=generator)
        return by_torch(tensor, p, generator)

    return bernoulli_


def fill(tensor: torch.Tensor, p: float, generator: torch.Generator) -> torch.Tensor:
    """Fill a dense CPU tensor of a dtype in `_ONES` with ones, with probability `p`, and zeros, as torch does."""
    with _lock:
        while True:
            before = generator.get_state()
            after = _draw(tensor, p, before.clone())
            # If another thread has drawn by torch in the meantime, these draws belong to it.
            if torch.ops.aten.equal(generator.get_state(), before):
                generator.set_state(after)
                return tensor


def _draw(tensor: torch.Tensor, p: float, state: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` from a generator's state, which is advanced in place and returned."""
    left = ctypes.c_int32.from_address(state.data_ptr() + _LEFT)
    position = ctypes.c_uint64.from_address(state.data_ptr() + _NEXT)
    following = KERNEL(
        "draw_bernoulli",
        state[_NUMBERS:],
        _WORDS if left.value == 1 else position.value,
        tensor,
        tensor.numel(),
        tensor.element_size(),
        _ONES[tensor.dtype],
        math.ceil(math.ldexp(p, 53)),
    )
    left.value, position.value = _WORDS + 1 - following, following
    return state


def _supports(tensor: torch.Tensor, p: float, generator: torch.Generator | None) -> bool:
    return (
        tensor.numel() >= MIN_ELEMENTS
        and 0 <= p <= 1
        and tensor.dtype in _ONES
        and (generator is None or generator.device.type == "cpu")
    )


def by_torch(tensor: torch.Tensor, p: float = 0.5, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw by torch's kernel for a tensor of probabilities, which makes the same draws."""
    if not 0 <= p <= 1:
        # The message of the overload with a number.
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p:g}")
    return tensor.bernoulli_(torch.tensor(p, dtype=torch.float64, device=tensor.device), generator=generator)


def _draws_as_torch() -> bool:
    """Whether `fill` makes the same draws and leaves the same state as torch. torch builds with MKL may differ."""
    ours, torchs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    if ours.get_state().numel() != _STATE_SIZE:
        return False
    for count, p in ((1000, 0.9), (2 * _WORDS + 1, 1 / 3), (311, 1e-6)):
        for generator in (ours, torchs):
            empty(5).uniform_(generator=generator)
        one = fill(empty(count, dtype=torch.bfloat16), p, ours)
        other = empty(count, dtype=torch.bfloat16).bernoulli_(p, generator=torchs)
        if not torch.equal(one, other) or not torch.equal(ours.get_state(), torchs.get_state()):
            return False
    return True
