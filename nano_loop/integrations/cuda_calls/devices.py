"""Devices as a program writes them, and the same with the CPU in the place of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_OF_TYPES = "torch.cuda."


def on_cpu(value: Any) -> Any:
    """Return the CPU for a GPU, also in dicts, and what has the type of a GPU's tensor with that of the CPU's.

    Parameters
    ----------
    value : object
        An argument of a call, such as ``"cuda:0"`` or ``torch.device("cuda")``. All others are returned as they are.
    """
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str):
        if value == "cuda" or (value.startswith("cuda:") and value[5:].isdigit()):
            return "cpu"
        return value.replace(_OF_TYPES, "torch.") if value.startswith(_OF_TYPES) else value
    if type(value) is dict:
        return {on_cpu(key): on_cpu(item) for key, item in value.items()}
    return value


def with_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes on the CPU, whatever device its arguments name. Memory is not pinned."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _of_device_argument(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*map(on_cpu, args), **kwargs)

    return call


def with_device_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same for a method ``to``, whose first argument may be the number of a GPU."""
    plain = with_devices(original)

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *map(_of_device_argument, args[:1]), *args[1:], **kwargs)

    return to


def _of_device_argument(value: Any) -> Any:
    """Return the device of ``device=``, where a number is that of a GPU."""
    return _CPU if isinstance(value, int) and not isinstance(value, bool) else on_cpu(value)
