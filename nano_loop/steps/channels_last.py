"""Lays images out as NHWC (and volumes as NDHWC), the order in which oneDNN's convolutions read and write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nano_loop.mechanisms.entry import Call
from nano_loop.mechanisms.layout import guard_layout, is_dense, laid_out_as, relay_state
from nano_loop.mechanisms.nested import map_tensors
from nano_loop.mechanisms.replace import replaced
from nano_loop.parts import Parts
from nano_loop.steps.step import Step

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class ChannelsLast(Step):
    """Re-lays 4-D and 5-D parameters and buffers, and the same inputs of every outermost call into the model.

    `Tensor.view` is replaced for the time: the `x.view(batch, -1)` behind so many convolutions needs the strides of
    NCHW, and falls back to `reshape` where it does not find them.
    """

    name = "channels_last"
    required = False  # one option serves all models of a run: a GAN's discriminator may well have no convolution

    def skip_reason(self, parts: Parts) -> str | None:
        """See `Step.skip_reason`."""
        if any(parameter.dim() in _FORMATS for parameter in parts.parameters()):
            return None
        return "the model has no 4-D or 5-D parameters"

    def apply(self, parts: Parts) -> str:
        """See `Step.apply`."""
        # Callbacks run last in, first out: state follows its parameters after those are back in their own layout.
        for optimizer in parts.optimizers:
            self.undoing.callback(relay_state, optimizer)
        for model in parts.models:
            self._relay(model)
        for optimizer in parts.optimizers:
            guard_layout(optimizer, self.undoing)
        self.undoing.enter_context(replaced(torch.Tensor, "view", _view_or_reshape))
        return self._detail(parts)

    def _relay(self, model: nn.Module) -> None:
        tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if _is_image_like(tensor)]
        for tensor in tensors:
            wanted = torch.empty_like(tensor, device="meta", memory_format=_FORMATS[tensor.dim()]).stride()
            if tensor.stride() != wanted and is_dense(tensor) and not _is_shared(tensor):
                self.undoing.callback(_lay_out, tensor, tensor.stride())
                _lay_out(tensor, wanted)
        dimensions = frozenset(tensor.dim() for tensor in tensors)
        self.entries.add(model, self.name, _converting_inputs(dimensions))

    def _detail(self, parts: Parts) -> str:
        parameters = list(parts.parameters())
        dimensions = sorted({parameter.dim() for parameter in parameters} & set(_FORMATS))
        count = sum(parameter.dim() in _FORMATS for parameter in parameters)
        inputs = " and ".join(f"{dimension}-D" for dimension in dimensions)
        return f"{count} of {len(parameters)} parameters, {inputs} inputs"


def _is_image_like(tensor: torch.Tensor) -> bool:
    return tensor.dim() in _FORMATS and tensor.layout is torch.strided and not tensor.is_quantized


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether other processes look at the tensor's memory, which they would no longer share once it has moved."""
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _lay_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    """Move `tensor` and its gradient to new memory with these strides; the tensor object stays."""
    moved = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    tensor.data = moved.copy_(tensor.data)
    if tensor.grad is not None and tensor.grad.layout is torch.strided:
        tensor.grad = laid_out_as(tensor, tensor.grad)


def _converting_inputs(dimensions: frozenset[int]) -> Any:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() not in dimensions or not _is_image_like(tensor):
            return tensor
        return tensor.contiguous(memory_format=_FORMATS[tensor.dim()])

    def layer(call: Call) -> Call:
        def with_converted_inputs(function: Call, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = map_tensors(convert, (args, kwargs))
            return call(function, *args, **kwargs)

        return with_converted_inputs

    return layer


def _view_or_reshape(view: Call) -> Call:
    def view_or_reshape(self: torch.Tensor, *shape: Any, **kwargs: Any) -> torch.Tensor:
        try:
            viewed: torch.Tensor = view(self, *shape, **kwargs)
            return viewed
        except RuntimeError:
            if kwargs or not shape or isinstance(shape[0], torch.dtype):
                raise
            return self.reshape(*shape)

    return view_or_reshape
