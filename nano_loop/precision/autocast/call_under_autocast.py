"""What surrounds each call into a model: autocast, notes of its activations, and explained dtype errors.

All three are one context, and autocast is set as `torch.autocast` does: a small model's call is so short that the
frames of Python around it are seen in the time of a step.
"""

from __future__ import annotations

from typing import Any

import torch

from nano_loop.precision.autocast.dtype_errors import explain
from nano_loop.precision.autocast.output_activations import Activations, noting


class CallUnderAutocast:
    """Run the body under autocast on the CPU; enter it once.

    `torch.compile` does not trace it: use `cpu_autocast` in code that it compiles.

    Parameters
    ----------
    dtype : torch.dtype
        See `cpu_autocast`.
    """

    __slots__ = ("_before", "_dtype", "_outer", "activations")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        #: What the body's operators have noted.
        self.activations = Activations()

    def __enter__(self) -> CallUnderAutocast:
        self._outer, noting.activations = noting.activations, self.activations
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self._before = enabled, dtype, torch.is_autocast_cache_enabled()
        torch.autocast_increment_nesting()
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", self._dtype)
        torch.set_autocast_cache_enabled(False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        enabled, dtype, keeps_casts = self._before
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)
        torch.set_autocast_cache_enabled(keeps_casts)
        noting.activations = self._outer
        if error is not None:
            explain(error)
