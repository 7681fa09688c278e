"""Values as bytes without pickle: what comes back is made of a fixed list of types, and nothing in it is executed.

The types are None, bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, `torch.dtype`,
`torch.Size`, `torch.Tensor` (strided or sparse), and arrays and numbers of numpy. A named tuple arrives as a
tuple. A message is a tree in JSON, and behind it the blobs that the tree refers to by number.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from nano_loop.distributed.comm.plain_tensors import Blobs, array_of, dtype_of, node_of_array, node_of_tensor, tensor_of
from nano_loop.errors import NanoError, error_message

_START = struct.Struct("<4sI")
_MAGIC = b"NLv1"
_AS_IS = (type(None), bool, int, float, str)
_DEEPEST = 200
# What the constructors of Python, numpy and torch raise; RecursionError is a RuntimeError.
_OF_WRONG_ARGUMENTS = (ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError, struct.error)


class NotPlainError(NanoError):
    """A value contains an object of another type."""


def dumps(value: Any) -> bytes:
    """Return a value as bytes.

    Raises
    ------
    NotPlainError
        If it contains an object of a type that is not in the list, or is nested too deeply.
    """
    blobs: list[bytes] = []
    tree = _node(value, blobs, 0)
    header = json.dumps({"value": tree, "blobs": [len(blob) for blob in blobs]}).encode()
    return b"".join([_START.pack(_MAGIC, len(header)), header, *blobs])


def loads(data: bytes) -> Any:
    """Return the value that `dumps` was given.

    Raises
    ------
    NanoError
        If the message is malformed.
    """
    try:
        header, blobs = _split(data)
        return _value(header["value"], blobs)
    except _OF_WRONG_ARGUMENTS as error:
        got = f"a malformed message of {len(data)} bytes ({type(error).__name__}: {str(error)[:200]})"
        expected = "ranks exchange what nano_loop.distributed.comm.plain has encoded"
        hint = "Run the same version of nano_loop on every host, and check who can reach the ranks' ports"
        raise NanoError(error_message(got, expected, hint)) from error


def _split(data: bytes) -> tuple[dict[str, Any], Blobs]:
    magic, length = _START.unpack_from(data)
    header = json.loads(data[_START.size : _START.size + length])
    if magic != _MAGIC or type(header) is not dict or set(header) != {"value", "blobs"}:
        raise ValueError("no message of this kind")
    rest = memoryview(data)[_START.size + length :]
    blobs = []
    for size in header["blobs"]:
        if type(size) is not int or not 0 <= size <= len(rest):
            raise ValueError("a blob has a wrong length")
        blobs.append(rest[:size])
        rest = rest[size:]
    if len(rest):
        raise ValueError("there is more than the header announces")
    return header, blobs


def _node(value: Any, blobs: list[bytes], depth: int) -> Any:
    if depth > _DEEPEST:
        raise NotPlainError("it is nested too deeply, or contains itself")
    kind = type(value)
    if kind in _AS_IS:
        return value
    if kind in _LEAVES:
        leaf = _LEAVES[kind](value, blobs)
        if leaf is not None:
            return leaf
    elif kind is dict:
        return ["dict", [[_node(part, blobs, depth + 1) for part in item] for item in value.items()]]
    elif kind in _CONTAINERS or _is_named_tuple(value):
        name = _CONTAINERS.get(kind, "tuple")
        return [name, [_node(item, blobs, depth + 1) for item in value]]
    elif isinstance(value, np.generic):
        number = node_of_array(np.asarray(value), blobs)
        if number is not None:
            return ["number", number]
    raise NotPlainError(f"{kind.__module__}.{kind.__qualname__}")


def _blob(value: bytes, blobs: list[bytes]) -> Any:
    blobs.append(value)
    return ["bytes", len(blobs) - 1]


def _array(value: np.ndarray[Any, Any], blobs: list[bytes]) -> Any:
    node = node_of_array(value, blobs)
    return node and ["array", node]


_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_LEAVES: dict[type, Callable[[Any, list[bytes]], Any]] = {
    bytes: _blob,
    complex: lambda value, blobs: ["complex", [value.real, value.imag]],
    torch.dtype: lambda value, blobs: ["dtype", str(value).removeprefix("torch.")],
    np.ndarray: _array,
    torch.Tensor: node_of_tensor,
}


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _value(node: Any, blobs: Blobs) -> Any:
    if type(node) in _AS_IS:
        return node
    name, content = cast("tuple[str, Any]", _pair(node))
    return _VALUES[name](content, blobs)


def _pair(node: Any) -> Any:
    if type(node) is not list or len(node) != 2 or type(node[0]) is not str:
        raise ValueError("no node of a tree")
    return node


def _list(content: Any, blobs: Blobs) -> list[Any]:
    if type(content) is not list:
        raise ValueError("no list")
    return [_value(item, blobs) for item in content]


def _dict(content: Any, blobs: Blobs) -> dict[Any, Any]:
    return {_value(key, blobs): _value(value, blobs) for key, value in content}


def _complex(content: Any, blobs: Blobs) -> complex:
    real, imaginary = content
    return complex(float(real), float(imaginary))


_VALUES: dict[str, Callable[[Any, Blobs], Any]] = {
    "list": _list,
    "tuple": lambda content, blobs: tuple(_list(content, blobs)),
    "set": lambda content, blobs: set(_list(content, blobs)),
    "frozenset": lambda content, blobs: frozenset(_list(content, blobs)),
    "size": lambda content, blobs: torch.Size(_list(content, blobs)),
    "dict": _dict,
    "bytes": lambda content, blobs: bytes(blobs[content]),
    "complex": _complex,
    "dtype": lambda content, blobs: dtype_of(content),
    "array": lambda content, blobs: array_of(content, blobs),
    "number": lambda content, blobs: array_of(content, blobs)[()],
    "tensor": tensor_of,
}
