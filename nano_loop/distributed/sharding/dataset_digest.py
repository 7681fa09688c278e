"""Digests of data, by which ranks notice that the loop has already given each of them different data."""

from __future__ import annotations

import re
import weakref
import zlib
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from nano_loop.distributed.comm.raw_bytes import raw_bytes

_MOST = 50_000  # objects that are looked at, so that a digest takes some milliseconds at most
_ITEMS = 1000  # of a list or a dict
_ELEMENTS = 1 << 12  # of a tensor or an array, which may be a file that is mapped
_DEPTH = 12
_ADDRESS = re.compile("0x[0-9a-fA-F]+")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.Size)
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType)


class Known:
    """Objects that were alike on all ranks. They may differ by now in what they cache, which has no meaning."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, value: object) -> bool:
        reference = self._references.get(id(value))
        return reference is not None and reference() is value

    def add(self, values: Iterable[Any]) -> None:
        """Add those of the values that have attributes. They are not kept alive."""
        for value in values:
            if hasattr(type(value), "__weakref__") and value not in self:
                self._references[id(value)] = weakref.ref(value)


class Digest:
    """A number that is equal on two ranks that hold the same values, and almost surely differs otherwise.

    It looks into containers, tensors, arrays and the attributes of objects, and at samples of large ones. Of random
    states, functions and locks only the kind counts.

    Parameters
    ----------
    *values : object
        The values.
    known : Known, optional
        Objects of which only the kind counts, too.

    Attributes
    ----------
    crc : int
        The number.
    seen : dict
        The objects that were looked into, by their ids.
    """

    def __init__(self, *values: Any, known: Known | None = None) -> None:
        self.crc = 0
        self.seen: dict[int, Any] = {}
        self._known = known or Known()
        self._add(values, 0)

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self._note(repr(value))
        elif isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray):
            self._add_array(value, depth + 1)
        elif id(value) not in self.seen and len(self.seen) < _MOST and depth < _DEPTH:
            self.seen[id(value)] = value
            self._note(type(value).__qualname__)
            if value not in self._known:
                self._add_contents(value, depth + 1)

    def _add_contents(self, value: Any, depth: int) -> None:
        if isinstance(value, (list, tuple)):
            self._add_items(value, depth)
        elif isinstance(value, dict):
            self._add_items([*value.items()], depth)
        elif isinstance(value, (set, frozenset)):
            self._note(repr(len(value)))
        elif isinstance(value, _NAMED):
            self._note(value.__qualname__)
        elif hasattr(type(value), "iloc"):  # a table of pandas, which has its values in no attribute
            self._note(_ADDRESS.sub("", repr(value)))
        else:
            self._add_items(sorted(getattr(value, "__dict__", {}).items(), key=lambda item: str(item[0])), depth)

    def _add_items(self, items: list[Any] | tuple[Any, ...], depth: int) -> None:
        self._note(repr(len(items)))
        for item in _sample(items, _ITEMS):
            self._add(item, depth)

    def _add_tensor(self, value: torch.Tensor) -> None:
        self._note(f"{value.dtype} {tuple(value.shape)}")
        if value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized:
            some = _some(value.detach()).resolve_conj().resolve_neg().contiguous()
            self.crc = zlib.crc32(raw_bytes(some), self.crc)

    def _add_array(self, value: np.ndarray[Any, Any], depth: int) -> None:
        self._note(f"{value.dtype} {value.shape}")
        some = value.flat[:: 1 + value.size // _ELEMENTS]
        if value.dtype.hasobject:
            self._add_items(some.tolist(), depth)
        else:
            self.crc = zlib.crc32(some.tobytes(), self.crc)

    def _note(self, content: str) -> None:
        self.crc = zlib.crc32(content.encode(errors="replace"), self.crc)


def digest(*values: Any) -> int:
    """Return the number of a `Digest`."""
    return Digest(*values).crc


def _some(value: torch.Tensor) -> torch.Tensor:
    """Return some elements of a tensor, without a copy of the others."""
    if value.is_contiguous():
        return value.view(-1)[:: 1 + value.numel() // _ELEMENTS]
    most = int(_ELEMENTS ** (1 / value.dim()))
    return value[tuple(slice(None, None, 1 + size // most) for size in value.shape)]


def _sample(items: Any, count: int) -> Iterable[Any]:
    """Return about so many items, from the first to the last."""
    return items if len(items) <= count else [*items[:: 1 + len(items) // count], items[-1]]
