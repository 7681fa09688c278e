"""Puts functions of ours in the place of torch's kernels for the time of a run, and gives them torch's own to call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from nano_loop.intercept.registry import shared_change
from nano_loop.intercept.torch_private import destroy_library

#: Torch's own kernel: takes the set of dispatch keys, and then what the operator takes.
Kernel = Callable[..., Any]


def gives_kernels() -> bool:
    """Whether this torch says which kernel an operator has, as 2.9 and later do."""
    return hasattr(torch.library, "get_kernel")


def overridden(
    operator: str, make: Callable[[Kernel | None], Callable[..., Any]], dispatch_key: str
) -> AbstractContextManager[None]:
    """Run a function of ours wherever torch's dispatcher would run its kernel, in the whole process.

    Parameters
    ----------
    operator : str
        The ATen operator with its overload, such as ``bernoulli_.float``.
    make : callable
        Is given torch's own kernel, None where torch does not give it (see `gives_kernels`), and returns the function.
        Both take the set of dispatch keys, and then what the operator takes. It is called for the first of several
        that ask for the same operator and key, so there is one maker for each.
    dispatch_key : str
        For which of the operator's kernels, such as ``CPU``.
    """
    return shared_change((operator, dispatch_key), lambda: _overridden(operator, make, dispatch_key))


def plainly(function: Callable[..., Any]) -> Callable[[Kernel | None], Callable[..., Any]]:
    """Return what `overridden` takes for a function that needs neither torch's kernel nor the dispatch keys."""

    def make(original: Kernel | None) -> Callable[..., Any]:
        return lambda keys, *args, **kwargs: function(*args, **kwargs)

    return make


@contextmanager
def _overridden(
    operator: str, make: Callable[[Kernel | None], Callable[..., Any]], dispatch_key: str
) -> Iterator[None]:
    function = make(_kernel(operator, dispatch_key))
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():  # torch says once a process that a kernel is overridden, as it is meant to be
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            keys = function is not torch.library.fallthrough_kernel
            library.impl(operator, function, dispatch_key, with_keyset=keys, allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        destroy_library(library)


def _kernel(operator: str, dispatch_key: str) -> Kernel | None:
    if not gives_kernels():
        return None
    found: Kernel = torch.library.get_kernel(f"aten::{operator}", dispatch_key).call_boxed
    return found
