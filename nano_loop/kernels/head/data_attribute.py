"""Replaces `Tensor.data`: writes to ``x.data`` change no version, so what depends on the values of ``x`` acts on reads.

Logits of a head are kept (`nano_loop.kernels.head`), and bf16 copies of activations are discarded
(`nano_loop.kernels.narrow_copies`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from nano_loop.kernels.head.head import keep_logits_of
from nano_loop.kernels.head.logits import LazyLogits
from nano_loop.kernels.narrow_copies import discard_copies
from nano_loop.patching.attributes import replaced
from nano_loop.patching.torch_private import in_functorch


def data_replaced() -> AbstractContextManager[None]:
    """Return a context in which ``x.data = logits`` uses the values of lazy logits, not their null pointer."""
    return replaced(Tensor, "data", _watched)


def _watched(data: Any) -> property:
    def read(tensor: Tensor) -> Any:
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not in_functorch():
            keep_logits_of(tensor)  # also those of `weight[0].data`, which has the memory of `weight`
            discard_copies(tensor)
        return data.__get__(tensor)

    def write(tensor: Tensor, value: Any) -> None:
        data.__set__(tensor, value.numbers() if isinstance(value, LazyLogits) else value)

    return property(read, write, data.__delete__, data.__doc__)
