"""Gradients of autograd functions by C functions, or by torch for double backward and batched gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_loop.kernels.memory import attempt
from nano_loop.patching.torch_private import below_autocast, in_functorch, is_batched, version
from nano_loop.patching.torch_private_autograd import in_forward_mode


def is_followed(*gradients: Tensor | None) -> bool:
    """Whether torch tracks the computation of a backward, to differentiate it or to batch it."""
    if torch.is_grad_enabled() or in_functorch() or in_forward_mode():
        return True
    return any(gradient is not None and is_batched(gradient) for gradient in gradients)


def save(ctx: Any, inputs: Sequence[Tensor | None], others: Sequence[Tensor | None], unread: Collection[int]) -> None:
    """Save the leading inputs of an autograd function, and other tensors, for `saved`.

    Inputs at indices in `unread` are only used by `gradients_of` if torch computes. As with torch's functions, a
    program may modify them before the backward: a bias, or a weight whose input requires no gradient.
    """
    ctx.unread = {place: (tensor, version(tensor)) for place in unread if (tensor := inputs[place]) is not None}
    ctx.save_for_backward(*(None if place in ctx.unread else tensor for place, tensor in enumerate(inputs)), *others)


def saved(ctx: Any, count: int) -> tuple[list[Any], Sequence[Any]]:
    """Return the `count` leading inputs and the other tensors. An activation checkpoint recomputes them once."""
    tensors = ctx.saved_tensors
    inputs = [ctx.unread.get(place, [tensor])[0] for place, tensor in enumerate(tensors[:count])]
    return inputs, tensors[count:]


def gradients_of(
    ctx: Any,
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    compute: Callable[[], Sequence[Tensor | None] | None],
    by_torch: Callable[..., Tensor | Sequence[Tensor]],
) -> tuple[Tensor | None, ...]:
    """Return the result of an autograd function's backward, given the gradients of the outputs.

    `inputs` are the leading inputs of the function, as saved. All other inputs have no gradient. `compute` returns the
    gradients of `inputs`, or None if torch must compute them; torch does not track it. `by_torch` accepts `inputs` and
    returns the outputs by torch operators, which torch then differentiates. So there is a second derivative if these
    have one.
    """
    needs = ctx.needs_input_grad
    if all(gradient is None for gradient in gradients):
        return (None,) * len(needs)
    computed = None if is_followed(*gradients) else attempt(compute)
    if computed is None:
        if any(version(tensor) != before for tensor, before in getattr(ctx, "unread", {}).values()):
            raise RuntimeError("a weight or bias was modified by an inplace operation before its second derivative")
        computed = _by_torch(needs, inputs, gradients, by_torch)
    return *computed, *[None] * (len(needs) - len(inputs))


def _by_torch(
    needs: Sequence[bool],
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    by_torch: Callable[..., Tensor | Sequence[Tensor]],
) -> list[Tensor | None]:
    """Recompute the outputs from aliases, which end the graph: the inputs' own graphs may lead to each other."""
    places = [place for place, _ in enumerate(inputs) if needs[place]]
    of_outs = tuple(gradient for gradient in gradients if gradient is not None)

    def outputs(*wanted: Tensor) -> tuple[Tensor, ...]:
        aliases = dict(zip(places, wanted, strict=True))
        with below_autocast():
            outs = by_torch(*(aliases.get(place, tensor) for place, tensor in enumerate(inputs)))
        pairs = zip([outs] if isinstance(outs, Tensor) else outs, gradients, strict=True)
        return tuple(out.to(gradient.dtype) for out, gradient in pairs if gradient is not None)

    wanted: list[Any] = [inputs[place] for place in places]
    if in_functorch():  # transforms do not see the graph outside of them
        computed = torch.func.vjp(outputs, *wanted)[1](of_outs)
    else:
        with torch.enable_grad():
            aliases = [tensor.view_as(tensor) for tensor in wanted]
            outs = outputs(*aliases)
        is_followed = torch.is_grad_enabled()
        computed = torch.autograd.grad(outs, aliases, of_outs, create_graph=is_followed, materialize_grads=True)
    by_place = dict(zip(places, computed, strict=True))
    return [by_place.get(place) for place, _ in enumerate(inputs)]
