"""Runs the backward of set-up models' custom autograd functions as `torch.amp.custom_bwd` would, if it needs that.

A `torch.autograd.Function` that saves a bf16 tensor in its forward gets an fp32 gradient in its backward, and torch's
products refuse the two together. The decorators `custom_fwd` and `custom_bwd` are for that, but few functions have
them. So a backward that raises such an error runs again under the autocast of the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from torch.autograd.function import BackwardCFunction

from nano_loop.patching.attributes import replaced
from nano_loop.patching.ownership import belongs_to_set_up_model

#: Runs a backward, given the function that runs it without arguments.
Runner = Callable[[Callable[[], Any]], Any]


def backwards_run_by(runner: Runner) -> AbstractContextManager[None]:
    """Return a context in which `runner` runs the backwards of the set-up models' custom functions.

    The `runner` of the first user of the context counts for all.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply(self: Any, *gradients: Any) -> Any:
            if not belongs_to_set_up_model():
                return original(self, *gradients)
            return runner(lambda: original(self, *gradients))

        return apply

    return replaced(cast(Any, BackwardCFunction), "apply", make)
