"""Keeps torch's attention layers from their fast paths, which have no autocast and are taken without gradients.

They ask whether autocast is enabled, but for CUDA. The setting is enabled for their calls alone: an activation
checkpoint around a layer would otherwise keep it, and torch 2.8 warns when the backward enables it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from nano_loop.patching.attributes import replaced
from nano_loop.patching.ownership import call_state

_LAYERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


@contextmanager
def fast_paths_left() -> Iterator[None]:
    """Let attention layers in the calls of set-up models under autocast compute operator by operator."""
    with ExitStack() as stack:
        for layer in _LAYERS:
            stack.enter_context(replaced(layer, "forward", _off_the_fast_path))
        yield


def _off_the_fast_path(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def with_autocast_noticed(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not call_state.accelerated or not torch.is_autocast_enabled("cpu"):
            return forward(self, *args, **kwargs)
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            return forward(self, *args, **kwargs)
        finally:
            torch.set_autocast_enabled("cuda", before)

    return with_autocast_noticed
