"""A replacement of one of torch's kernels, as the steps for kernels put it in force."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from nano_loop.kernels.memory import attempt
from nano_loop.patching.operators.operators import Kernel, overridden

#: Returns the algorithms of a call by name. They take its arguments.
Algorithms = Callable[[], Mapping[str, Callable[..., Any]]]
#: Chooses the algorithm of a call. Takes the call, its algorithms, and the name of the one to take by default.
Choose = Callable[[Any, Algorithms, str], str]


class Arguments(NamedTuple):
    """A call of an operator with several algorithms, which is the key of its measured times.

    Attributes
    ----------
    operator : str
        The name of the operator, or the kind of a product that may round, or another word for a gradient.
    arguments : tuple
        What the algorithms take.
    numbers : tuple
        What else the time depends on.
    is_differentiated : bool
        Whether the time counts that a gradient of the first argument takes, too.
    """

    operator: str
    arguments: tuple[Any, ...]
    numbers: tuple[Any, ...] = ()
    is_differentiated: bool = False


class Replacement(NamedTuple):
    """A replacement of one of torch's kernels.

    Attributes
    ----------
    operator : str
        The ATen operator with its overload, such as ``bernoulli_.float``.
    make : callable
        Takes torch's kernel, or None if torch does not return it, and returns the function; see `overridden`.
    dispatch_key : str
        The dispatch key of the kernel.
    """

    operator: str
    make: Callable[[Kernel | None], Callable[..., Any]]
    dispatch_key: str = "CPU"

    def in_force(self) -> AbstractContextManager[None]:
        """Return a context in which the kernel is replaced."""
        return overridden(*self)


def unless_none(compute: Callable[..., Any]) -> Callable[[Kernel | None], Callable[..., Any]]:
    """Return the `make` of a function that returns None where torch has to compute.

    torch computes as well where a C function does not take a tensor.

    Parameters
    ----------
    compute : callable
        The function. It takes torch's kernel, and then the operator's arguments.
    """

    def make(original: Kernel | None) -> Callable[..., Any]:
        assert original is not None

        def dispatched(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            result = attempt(compute, functools.partial(original, keys), *args, **kwargs)
            return original(keys, *args, **kwargs) if result is None else result

        return dispatched

    return make
