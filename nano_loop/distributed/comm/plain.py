"""Values as bytes without pickle: what comes back is made of a fixed list of types, and nothing in it is executed.

The types are None, bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, `torch.dtype`,
`torch.Size`, `torch.Tensor` (strided or sparse), and arrays and numbers of numpy. A named tuple arrives as a
tuple. A message is a tree in JSON, and behind it the blobs that the tree refers to by number.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from nano_loop.errors import NanoError, error_message
from nano_loop.patching.objects.optimizers import is_dense

#: The data that the nodes refer to by number.
_Blobs = Sequence[memoryview]

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
        number = _node_of_array(np.asarray(value), blobs)
        if number is not None:
            return ["number", number]
    raise NotPlainError(f"{kind.__module__}.{kind.__qualname__}")


def _blob(value: bytes, blobs: list[bytes]) -> Any:
    blobs.append(value)
    return ["bytes", len(blobs) - 1]


def _array(value: np.ndarray[Any, Any], blobs: list[bytes]) -> Any:
    node = _node_of_array(value, blobs)
    return node and ["array", node]


def _node_of_array(array: np.ndarray[Any, Any], blobs: list[bytes]) -> Any:
    """Return the node of an array, whose data is appended to `blobs`; None if its elements are no numbers."""
    if array.dtype.kind not in _NUMBERS:
        return None
    blobs.append(array.tobytes())
    return [array.dtype.str, list(array.shape), len(blobs) - 1]


def _node_of_tensor(tensor: torch.Tensor, blobs: list[bytes]) -> Any:
    """Return the node of a tensor, whose data is appended to `blobs`; None for what is no plain tensor on the CPU."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.is_quantized:
        return None
    detached, needs_gradient = tensor.detach(), tensor.requires_grad
    if tensor.layout is torch.strided:
        node = _node_of_strided(detached, blobs)
    elif tensor.layout in _SPARSE.values():
        parts = [_node_of_tensor(part, blobs) for part in _parts(detached)]
        node = ["sparse", list(tensor.shape), str(tensor.layout), *parts]
    else:
        return None
    return node and ["tensor", [needs_gradient, node]]


def _node_of_strided(tensor: torch.Tensor, blobs: list[bytes]) -> Any:
    tensor = tensor.resolve_conj().resolve_neg()
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,))
    blobs.append(flat.view(torch.uint8).numpy().tobytes())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ["strided", dtype, list(tensor.shape), list(tensor.stride()), len(blobs) - 1]


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return whole.indices(), whole.values()
    if tensor.layout in _BY_COLUMN:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return tensor.crow_indices(), tensor.col_indices(), tensor.values()


_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_LEAVES: dict[type, Callable[[Any, list[bytes]], Any]] = {
    bytes: _blob,
    complex: lambda value, blobs: ["complex", [value.real, value.imag]],
    torch.dtype: lambda value, blobs: ["dtype", str(value).removeprefix("torch.")],
    np.ndarray: _array,
    torch.Tensor: _node_of_tensor,
}


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _value(node: Any, blobs: _Blobs) -> Any:
    if type(node) in _AS_IS:
        return node
    name, content = cast("tuple[str, Any]", _pair(node))
    return _VALUES[name](content, blobs)


def _pair(node: Any) -> Any:
    if type(node) is not list or len(node) != 2 or type(node[0]) is not str:
        raise ValueError("no node of a tree")
    return node


def _list(content: Any, blobs: _Blobs) -> list[Any]:
    if type(content) is not list:
        raise ValueError("no list")
    return [_value(item, blobs) for item in content]


def _dict(content: Any, blobs: _Blobs) -> dict[Any, Any]:
    return {_value(key, blobs): _value(value, blobs) for key, value in content}


def _complex(content: Any, blobs: _Blobs) -> complex:
    real, imaginary = content
    return complex(float(real), float(imaginary))


def _array_of(node: Any, blobs: _Blobs) -> np.ndarray[Any, Any]:
    """Return the array of a node; it can be written to. What it raises for a wrong node, `plain.loads` handles."""
    kind, shape, number = node
    dtype = np.dtype(str(kind))
    if dtype.kind not in _NUMBERS:
        raise ValueError("no array of numbers")
    return np.frombuffer(bytearray(blobs[number]), dtype).reshape(_sizes(shape))


def _tensor_of(node: Any, blobs: _Blobs) -> torch.Tensor:
    """Return the tensor of a node, with the strides that it had if its memory was dense."""
    needs_gradient, (kind, *content) = node
    tensor = _KINDS[kind](content, blobs)
    return tensor.requires_grad_() if needs_gradient is True else tensor


def _dtype_of(name: Any) -> torch.dtype:
    """Return the dtype that has a name."""
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError("no dtype of torch")
    return dtype


def _strided(content: Any, blobs: _Blobs) -> torch.Tensor:
    name, shape, strides, number = content
    dtype, sizes, steps = _dtype_of(name), _sizes(shape), _sizes(strides)
    if len(sizes) != len(steps) or math.prod(sizes) * dtype.itemsize != len(blobs[number]):
        raise ValueError("a tensor has other data than its shape needs")
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype, device="cpu")
    if 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) != math.prod(sizes):
        raise ValueError("a tensor's strides do not fit its memory")
    flat = torch.frombuffer(bytearray(blobs[number]), dtype=dtype)
    return flat.as_strided(sizes, steps)


def _sparse(content: Any, blobs: _Blobs) -> torch.Tensor:
    shape, layout, *nodes = content
    parts, sizes, kind = [_part(node, blobs) for node in nodes], _sizes(shape), _SPARSE[layout]
    if kind is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, sizes, check_invariants=True).coalesce()
    make: Any = torch.sparse_compressed_tensor  # torch's own annotation of it has other parameters
    made: torch.Tensor = make(*parts, sizes, layout=kind, check_invariants=True)
    return made


def _part(node: Any, blobs: _Blobs) -> torch.Tensor:
    name, content = node
    if name != "tensor":
        raise ValueError("a part of a tensor is no tensor")
    return _tensor_of(content, blobs)


def _sizes(numbers: Any) -> tuple[int, ...]:
    if type(numbers) is not list or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("no sizes")
    return tuple(numbers)


_KINDS = {"strided": _strided, "sparse": _sparse}


_VALUES: dict[str, Callable[[Any, _Blobs], Any]] = {
    "list": _list,
    "tuple": lambda content, blobs: tuple(_list(content, blobs)),
    "set": lambda content, blobs: set(_list(content, blobs)),
    "frozenset": lambda content, blobs: frozenset(_list(content, blobs)),
    "size": lambda content, blobs: torch.Size(_list(content, blobs)),
    "dict": _dict,
    "bytes": lambda content, blobs: bytes(blobs[content]),
    "complex": _complex,
    "dtype": lambda content, blobs: _dtype_of(content),
    "array": lambda content, blobs: _array_of(content, blobs),
    "number": lambda content, blobs: _array_of(content, blobs)[()],
    "tensor": _tensor_of,
}
