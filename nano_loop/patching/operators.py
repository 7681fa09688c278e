"""Replaces torch's kernels by Python functions during a run. A function can call the kernel it replaces.

Under autocast, the rules of a set-up model may list an operator; they take precedence over the functions. If several
runs add functions for one operator, the last one is called, and all of them call torch's own kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from nano_loop.patching.ownership import rules_now
from nano_loop.patching.patch_table import shared_change
from nano_loop.patching.torch_private import destroy_library, full_name, has_kernel
from nano_loop.patching.torch_private_compiler import forget_dispatch, never_compiled

#: torch's own kernel. It accepts the dispatch key set, followed by the arguments of the operator.
Kernel = Callable[..., Any]


#: Why something needs kernels that this torch version cannot return; see `gives_kernels`.
NO_KERNELS = f"torch {torch.__version__} does not expose the kernels of operators; 2.9 and later do"


def gives_kernels() -> bool:
    """Whether this torch version can return the kernel of an operator (2.9 and later)."""
    return hasattr(torch.library, "get_kernel")


def kernel(operator: str, dispatch_key: str) -> Kernel:
    """Return torch's kernel for an operator. Requires `gives_kernels`."""
    site = _sites.get(operator) if dispatch_key == AUTOCAST else None
    if site is not None and site.functions:  # the dispatcher returns ours
        assert site.original is not None
        return site.original
    torchs_kernel: Kernel = torch.library.get_kernel(full_name(operator), dispatch_key).call_boxed
    return torchs_kernel


AUTOCAST = "AutocastCPU"


class _Site:
    """The entry in the dispatcher for an operator under autocast while the operator has functions."""

    def __init__(self, operator: str) -> None:
        self.operator = operator
        #: torch's kernel, or None if torch cannot return it.
        self.original: Kernel | None = None
        #: The last one is called. A `_Place` is always first.
        self.functions: list[Callable[..., Any]] = []
        # For calls in other threads that the dispatcher sent here before the last function was removed.
        self._latest: Callable[..., Any] | None = None

    def __call__(self, keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        rules, functions = rules_now(), self.functions
        rule = None if rules is None else rules.operators.get(self.operator)
        function: Any = functions[-1] if functions else self._latest
        if rule is None:
            return function(keys, *args, **kwargs)
        return rule(function, keys, *args, **kwargs)

    def add(self, function: Callable[..., Any]) -> None:
        """Call this function from now on, unless it is a `_Place` and there are other functions."""
        if not self.functions and gives_kernels() and has_kernel(self.operator, AUTOCAST):
            self.original = kernel(self.operator, AUTOCAST)
        self.functions = [function, *self.functions] if isinstance(function, _Place) else [*self.functions, function]
        self._latest = function

    def remove(self, function: Callable[..., Any]) -> None:
        """Stop calling this function. The list is replaced because another thread may be reading it."""
        self.functions = [other for other in self.functions if other is not function]


_sites: dict[str, _Site] = {}


class _Place:
    """Computes an operator as torch does, so that rules can apply to operators without a function."""

    def __init__(self, operator: str, otherwise: Callable[..., Any]) -> None:
        self._operator, self._otherwise = operator, otherwise

    def __call__(self, keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        original = _sites[self._operator].original
        if original is None:
            return self._otherwise(self._operator, keys, *args, **kwargs)
        return original(keys, *args, **kwargs)


def ruled(operators: frozenset[str], otherwise: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let the rules of calls decide about operators under autocast, including operators without a function.

    The operators are ATen operators with their overloads, such as ``softmax.int``. `otherwise` computes an operator as
    torch does if torch has no autocast kernel or cannot return it. It accepts the operator, the dispatch key set, and
    the operator's arguments.
    """
    return overridden_together(
        operators, lambda: {operator: _Place(operator, otherwise) for operator in operators}, AUTOCAST
    )


def overridden(
    operator: str, make: Callable[[Kernel | None], Callable[..., Any]], dispatch_key: str
) -> AbstractContextManager[None]:
    """Replace a kernel in torch's dispatcher by a function, in the whole process.

    `operator` is the ATen operator with its overload, such as ``bernoulli_.float``. `dispatch_key` is the dispatch key
    of the kernel, such as ``CPU``.

    `make` accepts torch's kernel, or None if torch cannot return it (see `gives_kernels`), and returns the function.
    Both accept the dispatch key set, followed by the operator's arguments. `make` is called for the first user only, so
    use the same `make` for all replacements of a kernel.
    """

    def functions() -> dict[str, Callable[..., Any]]:
        return {operator: make(kernel(operator, dispatch_key) if gives_kernels() else None)}

    return overridden_together(operator, functions, dispatch_key)


def overridden_together(
    name: Hashable, make: Callable[[], Mapping[str, Callable[..., Any]]], dispatch_key: str
) -> AbstractContextManager[None]:
    """Replace kernels of several operators at once, which is faster, by those that `make` returns; see `overridden`."""
    return shared_change((name, dispatch_key), lambda: registered(make(), dispatch_key))


def plainly(function: Callable[..., Any]) -> Callable[[Kernel | None], Callable[..., Any]]:
    """Return an argument `make` for `overridden` from a function that needs neither kernel nor dispatch key set."""

    def make(original: Kernel | None) -> Callable[..., Any]:
        return lambda keys, *args, **kwargs: function(*args, **kwargs)

    return make


@contextmanager
def registered(functions: Mapping[str, Callable[..., Any]], dispatch_key: str) -> Iterator[None]:
    """Replace kernels by functions for one user. Use `overridden` if two runs may replace the same kernel."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with_sites = functions if dispatch_key == AUTOCAST else {}
    sites = {
        name: function for name, function in with_sites.items() if function is not torch.library.fallthrough_kernel
    }
    for operator, function in sites.items():
        _sites.setdefault(operator, _Site(operator)).add(function)
    try:
        with warnings.catch_warnings():  # torch warns about an overridden kernel; here it is intended
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for operator, function in functions.items():
                keys = function is not torch.library.fallthrough_kernel
                called = _sites[operator] if operator in sites else function
                never_compiled(called)  # Dynamo would compile it at graph breaks, such as at an LSTM
                library.impl(operator, called, dispatch_key, with_keyset=keys, allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        destroy_library(library)
        forget_dispatch(functions.keys(), dispatch_key)
        for operator, function in sites.items():
            _sites[operator].remove(function)
