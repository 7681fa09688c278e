"""Draws random masks fast: four elements from each 64-bit number of a vectorised generator, on several threads.

torch's `bernoulli_` on a CPU without MKL's generator takes one number of a scalar Mersenne Twister for each element,
on one thread. Here numpy's SFC64 (Small Fast Chaotic, by Chris Doty-Humphrey) fills 16 bits an element, and an element
is 1 where its 16 bits are below the probability. So a probability is rounded to a multiple of 1/65536.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

#: Below this many elements torch's own generator is as fast.
WORTH_IT = 1 << 14
#: Elements that one generator draws. It is fixed, so that a mask does not depend on the number of threads.
_CHUNK = 1 << 18
_LEVELS = 1 << 16

#: Calls a function with each number of a range, in any order.
Spread = Callable[[Callable[[int], None], range], object]


def one_by_one(function: Callable[[int], None], numbers: range) -> None:
    """Call `function` with each of the numbers, in the calling thread."""
    for number in numbers:
        function(number)


class Crew:
    """Threads that draw, started when they are first needed and ended by `close`.

    Starting them for each mask would take longer than drawing most of them.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def spread(self, function: Callable[[int], None], numbers: range) -> None:
        """Call `function` with each of the numbers, on as many threads as torch computes with."""
        threads = min(len(numbers), torch.get_num_threads())
        if threads == 1:  # also in a loader's worker, which has none of its parent's threads
            one_by_one(function, numbers)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(torch.get_num_threads(), "nano_loop-masks")
        # This thread takes its share too. numpy releases the GIL.
        others = [self._pool.submit(one_by_one, function, numbers[first::threads]) for first in range(1, threads)]
        one_by_one(function, numbers[::threads])
        for each in others:
            each.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def bernoulli_(
    tensor: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None, spread: Spread = one_by_one
) -> torch.Tensor:
    """Fill `tensor` in place with ones, each with probability `p`, and zeros; return it.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any shape, strides and dtype, on the CPU.
    p : float
        From 0 to 1. For a large tensor it is rounded to a multiple of 1/65536.
    generator : torch.Generator, optional
        The mask follows from its state; torch's default generator otherwise. It is advanced by one number for a large
        tensor, and as torch does it for a small one, which gets torch's own mask.
    spread : callable, optional
        Shares the drawing out among threads, as `Crew.spread` does; the mask is the same with any.
    """
    if tensor.numel() < WORTH_IT or not 0 < p < 1:
        # The overload that takes p as a tensor has a kernel of its own, with the very draws of the one we stand for.
        return tensor.bernoulli_(torch.tensor(p, dtype=torch.float64), generator=generator)
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
    return _fill(tensor, _mask(tensor.numel(), p, seed, spread))


def _fill(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # Whichever element gets which draw: a dense tensor is filled in the order of its memory, which is fastest.
    if torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        tensor.as_strided((tensor.numel(),), (1,)).copy_(mask)
    else:
        tensor.copy_(mask.view(tensor.shape))
    return tensor


def _mask(count: int, p: float, seed: int, spread: Spread) -> torch.Tensor:
    """Return `count` independent draws, 1 with probability `p`, the same ones for the same seed.

    They come as uint8, of which torch makes floats ten times as fast as of bools.
    """
    threshold = min(round(p * _LEVELS), _LEVELS - 1) - _LEVELS // 2  # the bits are read as signed numbers
    mask = np.empty(count, dtype=np.bool_)

    def draw(chunk: int) -> None:
        part = mask[chunk * _CHUNK : (chunk + 1) * _CHUNK]
        np.less(_bits(len(part), seed, chunk), threshold, out=part)

    spread(draw, range(-(-count // _CHUNK)))
    return torch.from_numpy(mask.view(np.uint8))


def _bits(count: int, seed: int, chunk: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Return `count` independent uniform 16-bit numbers."""
    generator = np.random.Generator(np.random.SFC64([seed, chunk]))
    return generator.integers(0, 1 << 64, size=-(-count // 4), dtype=np.uint64).view(np.int16)[:count]
