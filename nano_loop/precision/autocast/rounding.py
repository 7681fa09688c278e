"""Stochastic rounding of fp32 to bf16: up or down at random, so that the mean of many small updates is not lost.

bf16 has 8 bits, so rounding to nearest loses an update that is smaller than 1/512 of the weight. Rounding up with the
probability of the part that is cut off has the right mean (Gupta et al. 2015, arXiv:1502.02551; Zamirai et al. 2020,
arXiv:2010.06192).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nano_loop.patching.objects.optimizers import is_dense

_CUT = 16  # bits that fp32 has behind those of bf16
_POOL = 1 << 18  # numbers: so few that they stay in the cache


class StochasticRounding:
    """Rounds tensors with random numbers that are not torch's, so that the loop draws what it draws without it.

    A pool of them serves all tensors of a step, each from another place in it.

    Parameters
    ----------
    seed : int
        Two roundings with one seed give the same bits, as the ranks of a run need.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.Generator(np.random.SFC64(seed))
        self._pool = torch.empty(0, dtype=torch.int32)

    def renew(self) -> None:
        """Draw the pool anew: once a step."""
        drawn = self._generator.integers(0, 1 << 64, _POOL // 4, dtype=np.uint64, endpoint=False)
        self._pool = torch.from_numpy(drawn.view(np.uint16).astype(np.int32))

    def round(self, tensor: Tensor) -> Tensor:
        """Return an fp32 tensor in bf16, with its strides if it is dense; what bf16 can represent is not changed.

        Parameters
        ----------
        tensor : torch.Tensor
            fp32, of any shape. Its storage is overwritten.
        """
        flat = _flat(tensor)
        bits = flat.view(torch.int32)
        start = int(self._generator.integers(_POOL))
        for begin in range(0, len(bits), _POOL):
            piece = bits[begin : begin + _POOL]
            first = piece[: _POOL - start]
            first += self._pool[start : start + len(first)]
            second = piece[len(first) :]
            second += self._pool[: len(second)]
        rounded = bits.bitwise_right_shift_(_CUT).to(torch.int16).view(torch.bfloat16)
        if flat.data_ptr() == tensor.data_ptr():
            return rounded.as_strided(tensor.shape, tensor.stride())
        return rounded.view(tensor.shape)


def _flat(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor as they lie in memory, or a copy of them where there are gaps or overlaps."""
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)
