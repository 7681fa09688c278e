"""What a model hands its results to in Python that has no bf16 or fp16: numpy, and the distributions of torch.

A policy returns `Categorical(logits=...)`, or turns its action into an array within the call. Both get what the call
would have returned: fp32, and activations that were computed in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, distributions

from nano_loop.patching.attributes import replaced
from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.precision.autocast.output_activations import noting


@contextmanager
def consumers_get_fp32() -> Iterator[None]:
    """Let numpy and distributions get fp32 in calls into set-up models."""
    classes = {value for value in vars(distributions).values() if isinstance(value, type)}
    with ExitStack() as stack:
        stack.enter_context(replaced(Tensor, "numpy", _with_fp32))
        for kind in classes:
            if "__init__" in vars(kind) and issubclass(kind, distributions.Distribution):
                stack.enter_context(replaced(kind, "__init__", _with_fp32))
        yield


def _with_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        activations = noting.activations
        if activations is not None:
            args, kwargs = map_tensors(activations.in_fp32, (args, kwargs))
        return original(*args, **kwargs)

    return call
