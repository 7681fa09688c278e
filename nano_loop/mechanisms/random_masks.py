"""Draws random masks fast: four elements from each 64-bit number of a vectorised generator, on all threads.

torch's `bernoulli_` on a CPU without MKL's generator takes one number of a scalar Mersenne Twister for each element,
on one thread. Here numpy's SFC64 (Small Fast Chaotic, by Chris Doty-Humphrey) fills 16 bits an element, and an element
is 1 where its 16 bits are below the probability. So a probability is rounded to a multiple of 1/65536.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

#: Below this many elements torch's own generator is as fast.
WORTH_IT = 1 << 14
#: Elements that one generator draws. It is fixed, so that a mask does not depend on the number of threads.
_CHUNK = 1 << 18
_LEVELS = 1 << 16


def bernoulli_(tensor: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
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
    """
    if tensor.numel() < WORTH_IT or not 0 < p < 1:
        # The overload that takes p as a tensor has a kernel of its own, with the very draws of the one we stand for.
        return tensor.bernoulli_(torch.tensor(p, dtype=torch.float64), generator=generator)
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
    return _fill(tensor, _bits(tensor.numel(), seed), p)


def _fill(tensor: torch.Tensor, bits: torch.Tensor, p: float) -> torch.Tensor:
    threshold = round(p * _LEVELS) - _LEVELS // 2  # the bits are read as signed numbers
    mask = bits < min(threshold, _LEVELS // 2 - 1)
    # Whichever element gets which draw: a dense tensor is filled in the order of its memory, which is fastest.
    if torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        tensor.as_strided((tensor.numel(),), (1,)).copy_(mask)
    else:
        tensor.copy_(mask.view(tensor.shape))
    return tensor


def _bits(count: int, seed: int) -> torch.Tensor:
    """Return `count` independent uniform 16-bit numbers as an int16 tensor, the same ones for the same seed."""
    words = np.empty((count + 3) // 4, dtype=np.uint64)
    chunks = list(_chunks(words))
    if len(chunks) == 1 or torch.get_num_threads() == 1:
        for number, chunk in enumerate(chunks):
            _draw(chunk, seed, number)
    else:
        with ThreadPoolExecutor(min(len(chunks), torch.get_num_threads())) as pool:  # numpy releases the GIL
            list(pool.map(_draw, chunks, [seed] * len(chunks), range(len(chunks))))
    return torch.from_numpy(words.view(np.int16))[:count]


def _chunks(words: np.ndarray) -> Iterator[np.ndarray]:
    size = _CHUNK // 4
    yield from (words[start : start + size] for start in range(0, len(words), size))


def _draw(words: np.ndarray, seed: int, chunk: int) -> None:
    generator = np.random.Generator(np.random.SFC64([seed, chunk]))
    words[:] = generator.integers(0, 1 << 64, size=len(words), dtype=np.uint64, endpoint=False)
