"""Chooses how attention is computed: in blocks, by plain products, or by torch's kernel."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.intercept.torch_private import current_node_number, in_backward, in_mode, next_node_number
from nano_loop.kernels.attention import TORCH, WAYS, Arguments, Choose
from nano_loop.tuning.sizes import MOST_ELEMENTS, bucket, layout, most_elements
from nano_loop.tuning.tuner import Tuner, Way, Ways

#: Maximum number of shapes that are remembered: a loop may have a new one in each batch.
_MOST_SHAPES = 256
_SETTLED = -1
#: Plain products, the first guess where there are no blocks, have up to 1.5 times the error of torch's kernel.
_AS_EXACT = 1.6


class _Decision(NamedTuple):
    """How calls of one kind are computed.

    Attributes
    ----------
    way : str
        The way.
    turn : int
        The tuner's turn until whose end that is only a guess, or `_SETTLED`.
    since : int
        The first autograd node that was made after it was settled.
    thread : int
        The thread whose node that is.
    """

    way: str
    turn: int
    since: int = 0
    thread: int = 0


def chooser(tuner: Tuner) -> Choose:
    """Return what `nano_loop.kernels.attention` asks for a way."""
    known: dict[Any, _Decision] = {}

    def choose(given: Arguments, possible: list[str], guess: str) -> str:
        shapes = tuple((each.shape, each.stride()) for each in given[:3])
        key = (shapes, given.is_causal, given.dropout_p > 0, _mask(given))
        found = known.get(key)
        # An activation checkpoint computes again in the backward, and has to keep the tensors that the forward kept.
        if in_backward():
            if found is None:
                return guess
            before = found.thread == threading.get_ident() and (current_node_number() or 0) < found.since
            return guess if before else found.way
        if found is None or found.turn not in (_SETTLED, tuner.turn):
            if len(known) >= _MOST_SHAPES:
                known.clear()
            found = known[key] = _decided(tuner, given, possible, guess)
        return found.way

    return choose


def _decided(tuner: Tuner, given: Arguments, possible: list[str], guess: str) -> _Decision:
    scores = given.query.numel() // max(given.query.size(-1), 1) * given.key.size(-2)
    if not 0 < max(most_elements(given[:3]), scores) <= MOST_ELEMENTS or len(possible) == 1:
        return _Decision(guess, _SETTLED)
    if in_mode() or torch.is_inference_mode_enabled():
        return _Decision(guess, tuner.turn)
    way = tuner.choose(_key(given), guess, lambda: _ways(given, possible))
    if way is None:
        return _Decision(guess, tuner.turn)
    return _Decision(way if way in possible else guess, _SETTLED, next_node_number(), threading.get_ident())


def _ways(given: Arguments, possible: Sequence[str]) -> Ways:
    """Return the ways to compute a call and its gradients, without the dropout, which draws from the generator."""
    leaves = [each.detach().requires_grad_() for each in given[:3]]
    outs = (*given.query.shape[:-1], given.value.size(-1))
    gradient = torch.linspace(-1, 1, outs[-1]).sin_().to(given.query.dtype).expand(outs).contiguous()

    def of(name: str) -> Way:
        def way() -> Sequence[Tensor]:
            with torch.enable_grad(), _hooks_of_the_loop_are_not_called():
                out = WAYS[name](*leaves, given.mask, 0.0, given.is_causal, given.scale)
                return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

        return way

    def reference() -> Sequence[Tensor]:
        in_fp32 = [each.detach().float().requires_grad_() for each in leaves]
        mask = given.mask if given.mask is None or given.mask.dtype is torch.bool else given.mask.float()
        with torch.enable_grad(), _hooks_of_the_loop_are_not_called():
            out = WAYS[TORCH](*in_fp32, mask, 0.0, given.is_causal, given.scale)
            return [out.detach(), *torch.autograd.grad(out, in_fp32, gradient.float())]

    return Ways({name: of(name) for name in possible}, TORCH, reference, _AS_EXACT)


def _hooks_of_the_loop_are_not_called() -> torch.autograd.graph.saved_tensors_hooks:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _key(given: Arguments) -> str:
    query, key, value = given[:3]
    sizes = [bucket(query.shape[:-3].numel()), *query.shape[-3:], "by", *key.shape[-3:], value.size(-1)]
    layouts = [layout(each) for each in given[:3]]
    flags = ["causal"] * given.is_causal + ["dropout"] * (given.dropout_p > 0)
    return " ".join(map(str, ["attention", *sizes, *layouts, *flags, _mask(given)])).rstrip()


def _mask(given: Arguments) -> str:
    return "" if given.mask is None else f"{str(given.mask.dtype).removeprefix('torch.')} mask"
