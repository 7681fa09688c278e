"""Runs operators in the widest dtype if their bf16 or fp16 kernels are wrong or missing, or do not accept fp32 as well.

CUDA's autocast promotes the inputs of some, and runs others in fp32. On a CPU, autocast does not handle them, so a
graph convolution (`torch.sparse.mm`) and pooling by `scatter_add_` raise torch's dtype error, and `matrix_exp` returns
NaN. ``operators.json`` lists them by version of torch: `scripts/sweep_operators.py` generates it by running all of
torch's operators.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nano_loop.patching.nested_tensors import map_tensors
from nano_loop.patching.operators import Kernel, gives_kernels, kernel, overridden_together
from nano_loop.patching.ownership import call_state
from nano_loop.patching.torch_private import below_autocast, is_operator
from nano_loop.patching.walk import find
from nano_loop.precision.autocast.autocast import LOW_DTYPES, to_fp32
from nano_loop.precision.autocast.default_ops import as_torch_does, below, overload_of, written_places

_TABLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("operators.json").read_text())
_VERSION = ".".join(torch.__version__.split(".")[:2])
#: For a version of torch that was not swept, the last table applies.
_SWEPT = _TABLES.get(_VERSION, [*_TABLES.values()][-1])

#: By operator, the inputs for which it computes in the widest dtype: only "bfloat16" or "float16", "mixed", or only
#: "float32" if it is composed of products.
TABLE: Mapping[str, frozenset[str]] = {name: frozenset(rules) for name, rules in _SWEPT["widest"].items()}
#: Operators for which autocast casts to bf16, including CSR matrices, for which torch has no bf16 kernel.
_PRODUCTS = ("mm", "matmul", "addmm")
_KEY = "AutocastCPU"
_CSR = frozenset((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))


def widest_dtype_computed() -> AbstractContextManager[None]:
    """Run these operators of set-up models in the widest dtype until the last user of this context exits."""
    return overridden_together("widest dtype", functions, _KEY)


def functions() -> dict[str, Callable[..., Any]]:
    """Return the replacements of the operators that exist in this version of torch."""
    products = {name: _in_fp32_if_csr(name, kernel(name, _KEY)) for name in _PRODUCTS if gives_kernels()}
    return {**{name: _widest(name, rules) for name, rules in TABLE.items() if is_operator(name)}, **products}


def _widest(name: str, rules: frozenset[str]) -> Callable[..., Any]:
    alone = frozenset(dtype for dtype in (*LOW_DTYPES, torch.float32) if str(dtype).removeprefix("torch.") in rules)

    def compute(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensor for tensor in find(Tensor, (args, kwargs)) if tensor.is_floating_point()]
        dtypes = frozenset(tensor.dtype for tensor in tensors)
        is_refused = len(dtypes) > 1 or dtypes & alone or any(one.layout is not torch.strided for one in tensors)
        if not call_state.accelerated or not is_refused or dtypes.isdisjoint((*LOW_DTYPES, *alone)):
            return as_torch_does(name, keys, *args, **kwargs)
        return _in_widest_dtype(overload_of(name), alone, args, kwargs)

    return compute


def _in_widest_dtype(overload: Any, alone: frozenset[torch.dtype], args: Any, kwargs: Any) -> Any:
    """Compute in fp32, or in the dtype of the tensor that is written to if there is a kernel for it."""
    places = (args[place] if isinstance(place, int) else kwargs.get(place) for place in written_places(overload))
    written: list[Tensor] = [*find(Tensor, [*places])]
    wide = {id(tensor): tensor.float() if tensor.dtype in alone else tensor for tensor in written}
    target = next((tensor.dtype for tensor in wide.values() if tensor.is_floating_point()), torch.float32)

    def cast(tensor: Tensor) -> Tensor:
        if id(tensor) in wide:
            return wide[id(tensor)]
        return _in_dtype(tensor, target) if tensor.dtype in (*LOW_DTYPES, torch.float32) else tensor

    outputs = below(overload, *map_tensors(cast, (args, kwargs)))
    originals = {id(wide[id(tensor)]): tensor for tensor in written}
    for tensor in written:
        computed = wide[id(tensor)]
        if computed is not tensor:
            if tensor.shape != computed.shape:  # an output that torch must resize
                tensor.resize_(computed.shape)
            tensor.copy_(computed)
    return map_tensors(lambda output: originals.get(id(output), output), outputs)


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.layout is not torch.sparse_coo or not tensor.requires_grad:
        return tensor.to(dtype)
    tensor = tensor.coalesce()  # the backward of a sparse tensor's cast refuses the dense gradient of a product
    values = tensor.values().to(dtype)
    return torch.sparse_coo_tensor(tensor.indices(), values, tensor.shape, check_invariants=False, is_coalesced=True)


def _in_fp32_if_csr(name: str, original: Kernel) -> Callable[..., Any]:
    operator = overload_of(name)

    def product(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if call_state.accelerated and any(isinstance(arg, Tensor) and arg.layout in _CSR for arg in args):
            with below_autocast():
                return operator(*map_tensors(to_fp32, args), **kwargs)
        return original(keys, *args, **kwargs)

    return product
