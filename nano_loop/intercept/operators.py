"""Puts functions of our own in the place of torch's kernels, for a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nano_loop.intercept.torch_private import destroy_library


@contextmanager
def overridden(
    operator: str, function: Callable[..., Any], dispatch_key: str, *, with_keyset: bool = False
) -> Iterator[None]:
    """Let `function` run wherever torch's dispatcher would run its kernel, in the whole process.

    Parameters
    ----------
    operator : str
        The ATen operator with its overload, such as ``bernoulli_.float``.
    function : callable
        Takes what the operator takes. It cannot reach the kernel that it stands in for by calling the operator.
    dispatch_key : str
        For which of the operator's kernels, such as ``CPU``.
    with_keyset : bool
        Whether `function` first takes the set of dispatch keys, with which it can call a kernel that
        `torch.library.get_kernel` has found before.

    Notes
    -----
    Overrides of one operator may be nested: the last one holds, and leaving it brings back the one before.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():  # torch says once a process that a kernel is overridden, as it is meant to be
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            library.impl(operator, function, dispatch_key, with_keyset=with_keyset, allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        destroy_library(library)
