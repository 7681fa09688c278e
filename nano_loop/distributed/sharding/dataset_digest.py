"""Digests of data, used to detect that the loop has already given different data to each rank."""

from __future__ import annotations

import re
import zlib
from array import array
from collections import deque
from collections.abc import Container, Sequence
from contextlib import suppress
from datetime import date, timedelta
from decimal import Decimal
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from nano_loop.data.random_states import GENERATORS
from nano_loop.distributed.comm.raw_bytes import raw_bytes
from nano_loop.patching.walk import named_attributes_of

_MOST = 50_000  # objects per digest, so that it takes a few milliseconds at most
_ITEMS = 1000  # of a list or a dict
_ELEMENTS = 1 << 12  # of a tensor or an array, which may be a memory-mapped file
_DEPTH = 12
_ADDRESS = re.compile("0x[0-9a-fA-F]+")
_PLAIN = (
    *(type(None), bool, int, float, complex, range, slice, date, timedelta, Decimal),
    *(np.generic, torch.dtype, torch.Size),
)
_TEXT = (str, bytes, bytearray, array)
_PICKLING = ("__getstate__", "__reduce__", "__reduce_ex__")
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType)


class Digest:
    """A checksum that is equal on two ranks with the same values, and almost surely different otherwise.

    Objects count by their pickled state if their class pickles in Python, or if `pickled`, as for images and table
    records; otherwise by their attributes: pickles mostly exclude open files and caches. `known` objects count by their
    type only.
    """

    def __init__(
        self, *values: Any, known: Container[Any] = (), pickled: bool = False, elements: int = _ELEMENTS
    ) -> None:
        self.crc = 0  # the checksum
        self.seen: dict[int, Any] = {}  # the objects read so far, by id
        self._known = known
        self._pickled = pickled
        self._elements = elements
        self._add(values, 0)

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self._note(repr(value))
        elif isinstance(value, _TEXT):
            self._note(f"{type(value).__qualname__} {len(value)} {value[:: 1 + len(value) // self._elements]!r}")
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
        if isinstance(value, _NAMED):
            self._note(value.__qualname__)
        elif isinstance(value, (set, frozenset)):
            plain = [repr(item) for item in value if isinstance(item, (*_PLAIN, str, bytes))]
            self._note(repr(len(value) if len(value) > _ITEMS else (len(value), sorted(plain))))
        elif hasattr(type(value), "iloc"):  # a pandas table, which does not store its values in attributes
            self._note(_ADDRESS.sub("", repr(value)))
        elif isinstance(value, (deque, dict)):
            self._add_items([*value.items()] if isinstance(value, dict) else [*value], depth)
        elif isinstance(value, (list, tuple)):
            self._add_items(value, depth)
        elif not isinstance(value, GENERATORS):
            self._add_items(self._state_of(value), depth)

    def _state_of(self, value: Any) -> list[Any]:
        """Return the state that an object is pickled with, or its attributes."""
        # Use the pickled state if its class implements pickling in Python.
        if self._pickled or any(isinstance(getattr(type(value), name, None), FunctionType) for name in _PICKLING):
            with suppress(Exception):  # not every object can be pickled
                reduced = value.__reduce_ex__(4)
                parts = (reduced,) if isinstance(reduced, str) else reduced
                return [*parts[1:3], *(list(items) for items in parts[3:5] if items is not None)]
        return sorted(named_attributes_of(value), key=lambda item: str(item[0]))

    def _add_items(self, items: Sequence[Any], depth: int) -> None:
        self._note(repr(len(items)))
        # Approximately this many, including the first and the last one.
        for item in items if len(items) <= _ITEMS else [*items[:: 1 + len(items) // _ITEMS], items[-1]]:
            self._add(item, depth)

    def _add_tensor(self, value: torch.Tensor) -> None:
        self._note(f"{value.dtype} {tuple(value.shape)}")
        if value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized:
            some = self._some(value.detach()).resolve_conj().resolve_neg().contiguous()
            self.crc = zlib.crc32(raw_bytes(some), self.crc)

    def _add_array(self, value: np.ndarray[Any, Any], depth: int) -> None:
        self._note(f"{value.dtype} {value.shape}")
        some = value.flat[:: 1 + value.size // self._elements]
        if value.dtype.hasobject:
            self._add_items(some.tolist(), depth)
        else:
            self.crc = zlib.crc32(some.tobytes(), self.crc)

    def _some(self, value: torch.Tensor) -> torch.Tensor:
        """Return some elements of a tensor, without copying the others."""
        if value.is_contiguous():
            return value.view(-1)[:: 1 + value.numel() // self._elements]
        most = int(self._elements ** (1 / value.dim()))
        return value[tuple(slice(None, None, 1 + size // most) for size in value.shape)]

    def _note(self, content: str) -> None:
        self.crc = zlib.crc32(content.encode(errors="replace"), self.crc)
