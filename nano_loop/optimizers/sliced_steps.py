"""Steps optimizers without a fused kernel by torch's own operators, over slices of parameters that fit in the cache.

torch's function for such a step runs about ten operators, each over whole tensors: those of a large embedding pass
through memory thirty times. Each element is computed alone, so the operators may as well run over one slice after
another, and the bits are the same: slices end at multiples of what vectors and threads take at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, Adadelta, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop

from nano_loop.optimizers.torch_fused_steps import is_torchs
from nano_loop.patching.attributes import replaced

#: The elements of a slice for each thread: a step reads and writes four to six tensors, of 256 KB per thread each.
ELEMENTS = 1 << 16

_KINDS = (Adadelta, RMSprop, NAdam, RAdam, Adamax, ASGD, Rprop)


def is_sliced(optimizer: Optimizer) -> bool:
    """Whether steps of an optimizer are by a function of torch that takes slices as well as whole parameters."""
    return any(isinstance(optimizer, kind) and type(optimizer).step is kind.step for kind in _KINDS)


def is_large(parameter: Tensor) -> bool:
    """Whether a parameter is stepped in slices."""
    return parameter.numel() > 2 * ELEMENTS * torch.get_num_threads()


@contextmanager
def large_parameters_sliced(optimizer: Optimizer) -> Iterator[None]:
    """Step large parameters of this kind of optimizer in slices. The context does not hold the optimizer."""
    kind = next(kind for kind in _KINDS if isinstance(optimizer, kind))
    del optimizer
    with ExitStack() as changes:
        changes.enter_context(replaced(sys.modules[kind.__module__], kind.__name__.lower(), _slicing))
        yield


def _slicing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of torch's function that steps the lists of a group."""
    if not is_torchs(original):
        return original

    @functools.wraps(original)
    def step(parameters: list[Tensor], *lists: Any, **settings: Any) -> None:
        is_loop = not settings.get("foreach") and not settings.get("capturable") and not settings.get("differentiable")
        if torch.compiler.is_compiling() or not is_loop:
            original(parameters, *lists, **settings)
            return
        rows = [[parameters[place], *(each[place] for each in lists if each)] for place in range(len(parameters))]
        whole = [not (is_large(row[0]) and _is_plain(row)) for row in rows]
        if any(whole):
            original(_chosen(parameters, whole), *(_chosen(each, whole) for each in lists), **settings)
        for row, is_whole in zip(rows, whole, strict=True):
            if not is_whole:
                _step_slices(original, row, [bool(each) for each in lists], settings)

    return step


def _chosen(tensors: list[Tensor], chosen: list[bool]) -> list[Tensor]:
    """Return the chosen tensors of a list, which is empty if no parameter has such a state."""
    return [tensor for tensor, is_chosen in zip(tensors, chosen, strict=True) if is_chosen] if tensors else []


def _is_plain(row: list[Any]) -> bool:
    """Whether a parameter, its gradient and its states are contiguous in fp32, or single numbers."""
    return all(
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_cpu
        and (tensor.dim() == 0 or (tensor.dtype is torch.float32 and tensor.is_contiguous() and not tensor.is_neg()))
        and (tensor.dim() == 0 or tensor.shape == row[0].shape)
        for tensor in row
    )


def _step_slices(
    original: Callable[..., Any], row: list[Tensor], has_states: list[bool], settings: dict[str, Any]
) -> None:
    """Step a parameter slice by slice. Single numbers, such as the count of steps, change with the last one."""
    size = ELEMENTS * torch.get_num_threads()
    slices = [torch.split(tensor.view(-1), size) if tensor.dim() else None for tensor in row]
    count = -(-row[0].numel() // size)
    for place in range(count):
        is_last = place == count - 1
        parts = iter(
            (tensor if is_last else tensor.clone()) if each is None else each[place]
            for tensor, each in zip(row, slices, strict=True)
        )
        parameter = next(parts)
        original([parameter], *([next(parts)] if has else [] for has in has_states), **settings)
