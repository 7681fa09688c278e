"""Says in which dtypes torch can run an LSTM on this CPU.

Autocast hands LSTMs to oneDNN, whatever the CPU. oneDNN has no bf16 LSTM for CPUs without AVX-512, and no fp16 LSTM
that can be trained. Where it has none, torch raises "could not create a primitive descriptor".
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def can_train_lstms(dtype: torch.dtype) -> bool:
    """Return whether torch can train LSTMs on this CPU under autocast in a dtype."""
    if dtype is torch.float16:
        return False
    # The user may have set another default dtype or device.
    shapes = (1, 1, 1), (4, 1), (4,)
    state, weight, bias = (torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        try:
            torch.lstm(state, (state, state), (weight, weight, bias, bias), True, 1, 0.0, False, False, False)
        except RuntimeError:
            return False
    return True
