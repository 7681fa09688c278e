"""bf16 autocast, and the context inside which there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nano_loop.intercept.nested import map_tensors


def bf16_autocast(keep_casts: bool = True) -> AbstractContextManager[Any]:
    """Return the context in which torch runs matrix products and convolutions in bf16 on the CPU.

    Parameters
    ----------
    keep_casts : bool
        Whether a weight is cast once for all its uses inside; right only where no weight changes inside.
    """
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=keep_casts)


@contextmanager
def disable_casts() -> Iterator[None]:
    """Run everything inside in fp32, also on bf16 tensors that come from outside.

    Use it in a model's method around what needs the range or the digits of fp32, or around a whole call into a model.

    Examples
    --------
    >>> import torch, nano_loop
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     hidden = torch.nn.Linear(4, 4)(torch.ones(2, 4))
    ...     with nano_loop.disable_casts():
    ...         variance = hidden.var()
    >>> hidden.dtype, variance.dtype
    (torch.bfloat16, torch.float32)
    """
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    # An autocast to fp32 casts what torch's kernels take together; a disabled one would raise on bf16 with fp32.
    torch.set_autocast_dtype("cpu", torch.float32)
    torch.set_autocast_enabled("cpu", True)
    try:
        with _Upcast():
            yield
    finally:
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)


class _Upcast(TorchFunctionMode):
    """Hands every torch function fp32 copies of its bf16 arguments."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _writes_or_reads(func) or "out" in kwargs:
            return func(*args, **kwargs)
        args, kwargs = map_tensors(to_fp32, (args, kwargs))
        return func(*args, **kwargs)


def _writes_or_reads(func: Callable[..., Any]) -> bool:
    """Whether a function changes its argument, or only looks at it: `add_`, `__setitem__`, a property's `__get__`."""
    return getattr(func, "__name__", "").endswith("_")


def to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bf16 tensor as fp32, within the graph, and any other as it is."""
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor
