"""Runs the backward of set-up models' custom autograd functions under the autocast of their forward.

A `torch.autograd.Function` that saves a bf16 tensor in its forward gets an fp32 gradient in its backward, and torch's
products refuse the two together. The decorators `custom_fwd` and `custom_bwd` are for that, but few functions have
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch.autograd.function import BackwardCFunction

from nano_loop.patching.attributes import replaced
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.ownership import call_state

#: Makes the context of a backward from the dtype of the forward's autocast.
Autocast = Callable[[torch.dtype], AbstractContextManager[Any]]
# By the nodes of custom functions, which are their `ctx`.
_dtypes: WeakIdKeyDictionary = WeakIdKeyDictionary()


@contextmanager
def backwards_under_autocast(autocast: Autocast) -> Iterator[None]:
    """Run the backwards of set-up models' custom functions in `autocast`, as long as this context lasts.

    The `autocast` of the first user of the context counts for all.
    """

    def applying(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply(self: Any, *gradients: Any) -> Any:
            dtype = _dtypes[self] if self in _dtypes else None  # noqa: SIM401  # its `get` has no types
            if dtype is None:
                return original(self, *gradients)
            with autocast(dtype):
                return original(self, *gradients)

        return apply

    owner = cast(Any, BackwardCFunction)
    with replaced(owner, "__init__", _noting), replaced(owner, "apply", applying):
        yield


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if call_state.accelerated and torch.is_autocast_enabled("cpu"):
            _dtypes[self] = torch.get_autocast_dtype("cpu")

    return init
