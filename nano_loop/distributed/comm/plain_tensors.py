"""Tensors and arrays as nodes of a tree, with their data in blobs; see `nano_loop.distributed.comm.plain`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nano_loop.patching.objects.optimizers import is_dense

#: The data that the nodes refer to by number.
Blobs = Sequence[memoryview]

_NUMBERS = "biufc"  # the kinds of numpy's dtypes that are plain numbers
_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_SPARSE = {str(layout): layout for layout in _LAYOUTS}
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)


def node_of_array(array: np.ndarray[Any, Any], blobs: list[bytes]) -> Any:
    """Return the node of an array, whose data is appended to `blobs`; None if its elements are no numbers."""
    if array.dtype.kind not in _NUMBERS:
        return None
    blobs.append(array.tobytes())
    return [array.dtype.str, list(array.shape), len(blobs) - 1]


def array_of(node: Any, blobs: Blobs) -> np.ndarray[Any, Any]:
    """Return the array of a node; it can be written to. What it raises for a wrong node, `plain.loads` handles."""
    kind, shape, number = node
    dtype = np.dtype(str(kind))
    if dtype.kind not in _NUMBERS:
        raise ValueError("no array of numbers")
    return np.frombuffer(bytearray(blobs[number]), dtype).reshape(_sizes(shape))


def node_of_tensor(tensor: torch.Tensor, blobs: list[bytes]) -> Any:
    """Return the node of a tensor, whose data is appended to `blobs`; None for what is no plain tensor on the CPU."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.is_quantized:
        return None
    detached, needs_gradient = tensor.detach(), tensor.requires_grad
    if tensor.layout is torch.strided:
        node = _node_of_strided(detached, blobs)
    elif tensor.layout in _SPARSE.values():
        parts = [node_of_tensor(part, blobs) for part in _parts(detached)]
        node = ["sparse", list(tensor.shape), str(tensor.layout), *parts]
    else:
        return None
    return node and ["tensor", [needs_gradient, node]]


def tensor_of(node: Any, blobs: Blobs) -> torch.Tensor:
    """Return the tensor of a node, with the strides that it had if its memory was dense."""
    needs_gradient, (kind, *content) = node
    tensor = _KINDS[kind](content, blobs)
    return tensor.requires_grad_() if needs_gradient is True else tensor


def dtype_of(name: Any) -> torch.dtype:
    """Return the dtype that has a name."""
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError("no dtype of torch")
    return dtype


def _node_of_strided(tensor: torch.Tensor, blobs: list[bytes]) -> Any:
    tensor = tensor.resolve_conj().resolve_neg()
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,))
    blobs.append(flat.view(torch.uint8).numpy().tobytes())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ["strided", dtype, list(tensor.shape), list(tensor.stride()), len(blobs) - 1]


def _strided(content: Any, blobs: Blobs) -> torch.Tensor:
    name, shape, strides, number = content
    dtype, sizes, steps = dtype_of(name), _sizes(shape), _sizes(strides)
    if len(sizes) != len(steps) or math.prod(sizes) * dtype.itemsize != len(blobs[number]):
        raise ValueError("a tensor has other data than its shape needs")
    if not math.prod(sizes):
        return torch.empty(sizes, dtype=dtype, device="cpu")
    if 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) != math.prod(sizes):
        raise ValueError("a tensor's strides do not fit its memory")
    flat = torch.frombuffer(bytearray(blobs[number]), dtype=dtype)
    return flat.as_strided(sizes, steps)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return whole.indices(), whole.values()
    if tensor.layout in _BY_COLUMN:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return tensor.crow_indices(), tensor.col_indices(), tensor.values()


def _sparse(content: Any, blobs: Blobs) -> torch.Tensor:
    shape, layout, *nodes = content
    parts, sizes, kind = [_part(node, blobs) for node in nodes], _sizes(shape), _SPARSE[layout]
    if kind is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, sizes, check_invariants=True).coalesce()
    make: Any = torch.sparse_compressed_tensor  # torch's own annotation of it has other parameters
    made: torch.Tensor = make(*parts, sizes, layout=kind, check_invariants=True)
    return made


def _part(node: Any, blobs: Blobs) -> torch.Tensor:
    name, content = node
    if name != "tensor":
        raise ValueError("a part of a tensor is no tensor")
    return tensor_of(content, blobs)


def _sizes(numbers: Any) -> tuple[int, ...]:
    if type(numbers) is not list or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("no sizes")
    return tuple(numbers)


_KINDS = {"strided": _strided, "sparse": _sparse}
