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


def operator_of(name: str, schema: str, compute: Callable[..., Any]) -> Any:
    """Define an operator of torch, ``nano_loop::name``, and return it.

    Modes see it in place of what it is composed of. `torch.vmap` calls it for one element of a batch after another.
    """
    torch.library.define(f"nano_loop::{name}", schema)
    torch.library.impl(f"nano_loop::{name}", "CPU", compute)
    operator = getattr(torch.ops.nano_loop, name)

    def one_by_one(info: Any, dimensions: tuple[int | None, ...], *args: Any) -> Any:
        places = [*zip(args, dimensions, strict=True)]
        results = [
            operator(*[argument if place is None else argument.select(place, i) for argument, place in places])
            for i in range(info.batch_size)
        ]
        stacked = tuple(map(torch.stack, zip(*results, strict=True)))
        return stacked, (0,) * len(stacked)

    torch.library.register_vmap(f"nano_loop::{name}", one_by_one)
    return operator


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
