"""Recurrent layers under autocast: their weights are cast once a call, and LSTMs run where torch can train them.

Autocast hands LSTMs to oneDNN, whatever the CPU. oneDNN has no bf16 LSTM for CPUs without AVX-512: torch raises "could
not create a primitive descriptor".
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from nano_loop.patching.attributes import has_own
from nano_loop.patching.calls.calls import Call
from nano_loop.patching.torch_private import calls_only_forward
from nano_loop.precision.autocast.autocast import weights_cast_once

_LAYERS = (nn.LSTM, nn.GRU, nn.RNN)


@cache
def can_train_lstms(dtype: torch.dtype) -> bool:
    """Return whether torch can train LSTMs on this CPU under autocast in a dtype."""
    # The user may have set another default dtype or device.
    shapes = (1, 1, 1), (4, 1), (4,)
    state, weight, bias = (torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        try:
            torch.lstm(state, (state, state), (weight, weight, bias, bias), True, 1, 0.0, False, False, False)
        except RuntimeError:
            return False
    return True


def around_recurrent_layer(layer: nn.Module) -> Call | None:
    """Return a function around calls of a recurrent layer of torch, or None for other modules.

    Where a call runs no code of the user's, nothing changes a weight between two of its time steps.
    """
    return _with_weights_cast_once if type(layer) in _LAYERS else None


def _with_weights_cast_once(function: Call, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    if type(self) not in _LAYERS or not calls_only_forward(self) or not has_own(type(self), "forward"):
        return function(self, *args, **kwargs)
    with weights_cast_once():
        return function(self, *args, **kwargs)
