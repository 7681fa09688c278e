"""Copies rank 0's values to all ranks, after checking that all have the same tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.members import named_buffers_of, named_parameters_of

#: A tensor, and its name for a message.
Named = tuple[str, torch.Tensor]


def named_parameters(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[Named]:
    """Yield the parameters of models, then other tensors of optimizers, each once, in the same order on every rank."""
    of_models = ((_name(model, name), parameter) for model in models for name, parameter in named_parameters_of(model))
    yield from _each_once(itertools.chain(of_models, _of_optimizers(optimizers)))


def named_buffers(models: Sequence[nn.Module]) -> Iterator[Named]:
    """Yield the buffers of models, each once."""
    yield from _each_once((_name(model, name), buffer) for model in models for name, buffer in named_buffers_of(model))


def _name(model: nn.Module, name: str) -> str:
    # A traced model has another class until it is unpickled.
    kind = GraphModule if isinstance(model, GraphModule) else type(model)
    owner = model.original_name if isinstance(model, torch.jit.ScriptModule) else kind.__name__
    return f"{owner}.{name}"


def _of_optimizers(optimizers: Sequence[Optimizer]) -> Iterator[Named]:
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for place, tensor in enumerate(group["params"]):
                yield f"{type(optimizer).__name__}.param_groups[{number}]['params'][{place}]", tensor


def _each_once(named: Iterable[Named]) -> Iterator[Named]:
    seen: set[int] = set()
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def make_equal(ranks: Ranks, named: Sequence[Named], more: Sequence[str] = ()) -> None:
    """Overwrite tensors with rank 0's; raise on every rank if these, or `more` descriptions, differ. Collective."""
    _refuse_without_values(named)
    _refuse_difference(ranks.gather([*(_signature(name, tensor) for name, tensor in named), *more]))
    strided = [tensor for _, tensor in named if _is_raw(tensor)]
    others = [tensor for _, tensor in named if not _is_raw(tensor)]
    with torch.no_grad():
        ranks.broadcast_tensors([_without_overlap(tensor) for tensor in strided])
        for tensor, value in zip(others, ranks.broadcast([tensor.detach() for tensor in others]), strict=True):
            tensor.copy_(value)


def _refuse_without_values(named: Sequence[Named]) -> None:
    for name, tensor in named:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            expected = "rank 0's values cannot be copied to the other ranks yet"
            raise NanoError(error_message(f"{name} has no shape yet", expected, "Call the model once before setup"))
        if tensor.device.type != "cpu":
            method = "to_empty" if tensor.device.type == "meta" else "to"
            hint = f"Call model.{method}(device='cpu') and set its values before setup"
            expected = "rank 0's values are copied to the other ranks from the memory of the CPU"
            raise NanoError(error_message(f"{name} is on the device {str(tensor.device)!r}", expected, hint))


def _is_raw(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of its bytes only. A quantized tensor also has scales."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def _signature(name: str, tensor: torch.Tensor) -> str:
    # Strides must match, because gradients are averaged in the order of the parameters' memory.
    strides = f", strides {tensor.stride()}" if tensor.layout is torch.strided else f", {tensor.layout}"
    return f"{name}, {tensor.dtype} of shape {tuple(tensor.shape)}{strides}"


def _refuse_difference(signatures: list[list[str]]) -> None:
    for rank, signature in enumerate(signatures):
        for first, other in itertools.zip_longest(signatures[0], signature, fillvalue="nothing"):
            if first != other:
                got = f"rank {rank} has {other} where rank 0 has {first}"
                expected = "all ranks must set up the same models and optimizers"
                raise NanoError(error_message(got, expected, "Build them the same way on every rank"))


def _without_overlap(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of an expanded tensor without repeated memory, because it cannot be written to as a whole."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.detach()[tuple(slice(0, 1) if stride == 0 and size else slice(None) for size, stride in sizes)]
