"""Values as bytes without pickle: what comes back is made of a fixed list of types, and nothing in it is executed.

The types are None, bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, `torch.dtype`,
`torch.Size`, `torch.Tensor` (strided or sparse), and arrays and numbers of numpy. A named tuple arrives as a
tuple. A message is a tree in JSON, and behind it the blobs that the tree refers to by number: a node is a value of
JSON's own, or the name of a type, the nodes of the parts by which a value of it is made, and the number of its blob.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nano_loop.errors import NanoError, error_message
from nano_loop.patching.objects.optimizers import is_dense

#: The data that the nodes refer to by number.
_Blobs = Sequence[memoryview]
#: The name of a type, the parts by which a value of it is made and, for some types, data.
_Content = tuple[Any, ...]

_NUMBERS = "biufc"  # the kinds of numpy's dtypes that are plain numbers
_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_SPARSE = {str(layout): layout for layout in _LAYOUTS}
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)

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


def _split(data: bytes) -> tuple[dict[str, Any], _Blobs]:
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
    if type(value) in _AS_IS:
        return value
    parts = _parts(value)
    if parts is None:
        raise NotPlainError(f"{type(value).__module__}.{type(value).__qualname__}")
    name, items, *data = parts
    numbers = range(len(blobs), len(blobs) + len(data))
    blobs += data
    return [name, [_node(item, blobs, depth + 1) for item in items], *numbers]


def _parts(value: Any) -> _Content | None:
    """Return what a value is made of; None for one of another type."""
    kind = type(value)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind], value
    if kind in _LEAVES:
        return _LEAVES[kind](value)
    if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
        return "number", [np.asarray(value)]
    return ("tuple", value) if isinstance(value, tuple) and hasattr(value, "_fields") else None


def _parts_of_array(array: np.ndarray[Any, Any]) -> _Content | None:
    numbers = array.dtype.kind in _NUMBERS
    return ("array", [array.dtype.str, list(array.shape)], array.tobytes()) if numbers else None


def _parts_of_tensor(tensor: torch.Tensor) -> _Content | None:
    """Return what a tensor is made of; None for one that is not on the CPU, or quantized."""
    if tensor.device.type != "cpu" or tensor.is_quantized:
        return None
    whole = tensor.detach()
    if tensor.layout in _SPARSE.values():
        return "sparse", [tensor.requires_grad, str(tensor.layout), list(tensor.shape), *_stored(whole)]
    if tensor.layout is not torch.strided:
        return None
    whole = whole.resolve_conj().resolve_neg()
    if not is_dense(whole):
        whole = whole.contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))
    parts = [tensor.requires_grad, whole.dtype, list(whole.shape), list(whole.stride())]
    return "tensor", parts, flat.view(torch.uint8).numpy().tobytes()


def _stored(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return whole.indices(), whole.values()
    if tensor.layout in _BY_COLUMN:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return tensor.crow_indices(), tensor.col_indices(), tensor.values()


_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_LEAVES: dict[type, Callable[[Any], _Content | None]] = {
    dict: lambda value: ("dict", value.items()),
    bytes: lambda value: ("bytes", [], value),
    complex: lambda value: ("complex", [value.real, value.imag]),
    torch.dtype: lambda value: ("dtype", [str(value).removeprefix("torch.")]),
    np.ndarray: _parts_of_array,
    torch.Tensor: _parts_of_tensor,
}


def _value(node: Any, blobs: _Blobs) -> Any:
    """Return the value of a node. What it raises for a wrong node, `loads` handles."""
    if type(node) in _AS_IS:
        return node
    if type(node) is not list:
        raise ValueError("no node of a tree")
    name, parts, *numbers = node
    return _MADE[name]([_value(part, blobs) for part in parts], *[blobs[number] for number in numbers])


def _dtype(parts: list[Any]) -> torch.dtype:
    dtype = vars(torch).get(*parts)
    if not isinstance(dtype, torch.dtype):
        raise ValueError("no dtype of torch")
    return dtype


def _array(parts: list[Any], data: memoryview) -> np.ndarray[Any, Any]:
    """Return an array that can be written to."""
    kind, shape = parts
    dtype = np.dtype(str(kind))
    if dtype.kind not in _NUMBERS:
        raise ValueError("no array of numbers")
    return np.frombuffer(bytearray(data), dtype).reshape(_sizes(shape))


def _tensor(parts: list[Any], data: memoryview) -> torch.Tensor:
    """Return a tensor, with the strides that it had if its memory was dense."""
    needs_gradient, dtype, shape, strides = parts
    sizes, steps = _sizes(shape), _sizes(strides)
    if not isinstance(dtype, torch.dtype) or len(sizes) != len(steps):
        raise ValueError("no parts of a tensor")
    if math.prod(sizes) * dtype.itemsize != len(data):
        raise ValueError("a tensor has other data than its shape needs")
    if not math.prod(sizes):
        tensor = torch.empty(sizes, dtype=dtype, device="cpu")
    elif 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) != math.prod(sizes):
        raise ValueError("a tensor's strides do not fit its memory")
    else:
        tensor = torch.frombuffer(bytearray(data), dtype=dtype).as_strided(sizes, steps)
    return tensor.requires_grad_(needs_gradient is True)


def _sparse(parts: list[Any]) -> torch.Tensor:
    needs_gradient, layout, shape, *stored = parts
    sizes, kind = _sizes(shape), _SPARSE[layout]
    if not all(isinstance(part, torch.Tensor) for part in stored):
        raise ValueError("a part of a tensor is no tensor")
    if kind is torch.sparse_coo:
        indices, values = stored
        tensor = torch.sparse_coo_tensor(indices, values, sizes, check_invariants=True).coalesce()
    else:
        make: Any = torch.sparse_compressed_tensor  # torch's own annotation of it has other parameters
        tensor = make(*stored, sizes, layout=kind, check_invariants=True)
    return tensor.requires_grad_(needs_gradient is True)


def _sizes(numbers: Any) -> tuple[int, ...]:
    if type(numbers) is not list or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("no sizes")
    return tuple(numbers)


#: What makes a value of its parts and, for some types, its data, by the name of its type.
_MADE: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
    "dict": dict,
    "complex": lambda parts: complex(*parts),
    "bytes": lambda parts, data: bytes(data),
    "dtype": _dtype,
    "array": _array,
    "number": lambda parts: parts[0][()],
    "tensor": _tensor,
    "sparse": _sparse,
}
