"""Replaces torch's kernels by Python functions during a run. A function can call the kernel that it replaces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from nano_loop.intercept.registry import shared_change
from nano_loop.intercept.torch_private import destroy_library

#: torch's own kernel. It takes the dispatch key set, followed by the arguments of the operator.
Kernel = Callable[..., Any]


def gives_kernels() -> bool:
    """Whether this torch can return the kernel of an operator (2.9 and later)."""
    return hasattr(torch.library, "get_kernel")


def overridden(
    operator: str, make: Callable[[Kernel | None], Callable[..., Any]], dispatch_key: str
) -> AbstractContextManager[None]:
    """Replace a kernel in torch's dispatcher by a function, in the whole process.

    Parameters
    ----------
    operator : str
        The ATen operator with its overload, such as ``bernoulli_.float``.
    make : callable
        Takes torch's kernel, or None if torch does not return it (see `gives_kernels`), and returns the function. Both
        take the dispatch key set, followed by the arguments of the operator. `make` is called for the first user only,
        so use the same `make` for all replacements of a kernel.
    dispatch_key : str
        The dispatch key of the kernel, such as ``CPU``.
    """
    return shared_change((operator, dispatch_key), lambda: _overridden(operator, make, dispatch_key))


def plainly(function: Callable[..., Any]) -> Callable[[Kernel | None], Callable[..., Any]]:
    """Return the argument `make` of `overridden` for a function without the kernel and the dispatch key set."""

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
        with warnings.catch_warnings():  # torch warns once per process about an overridden kernel; here it is intended
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
