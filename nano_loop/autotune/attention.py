"""Chooses how attention is computed: in blocks, by plain products, or by torch's kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nano_loop.autotune.decisions import Decision, Decisions, decided
from nano_loop.autotune.hooks import none_for_saved_tensors
from nano_loop.autotune.sizes import MOST_ELEMENTS, bucket, layout, most_elements
from nano_loop.autotune.tuner import Tuner, Way, Ways
from nano_loop.kernels.attention.attention import ALGORITHMS, TORCH, Arguments, Choose

#: Plain products, the first guess where there are no blocks, have up to 1.5 times the error of torch's kernel.
_AS_EXACT = 1.6


def chooser(tuner: Tuner) -> Choose:
    """Return what `nano_loop.kernels.attention.attention` asks for a way."""
    decisions = Decisions(tuner)

    def choose(given: Arguments, possible: list[str], guess: str) -> str:
        shapes = tuple((each.shape, each.stride()) for each in given[:3])
        key = (shapes, given.is_causal, given.dropout_p > 0, _mask(given))

        def stored() -> str | None:
            found = tuner.choices.get(_key(given)) if _is_measured(given, possible) else None
            return found.way if found is not None and found.way in possible else None

        return decisions.way(key, lambda: guess, lambda: _decided(tuner, given, possible, guess), stored)

    return choose


def _is_measured(given: Arguments, possible: Sequence[str]) -> bool:
    scores = given.query.numel() // max(given.query.size(-1), 1) * given.key.size(-2)
    return 0 < max(most_elements(given[:3]), scores) <= MOST_ELEMENTS and len(possible) > 1


def _decided(tuner: Tuner, given: Arguments, possible: list[str], guess: str) -> Decision:
    if not _is_measured(given, possible):
        return Decision(guess)
    found = decided(guess, lambda: tuner.choose(_key(given), guess, lambda: _ways(given, possible)))
    return found if found.way in possible else Decision(guess)


def _ways(given: Arguments, possible: Sequence[str]) -> Ways:
    """Return the ways to compute a call and its gradients, without the dropout, which draws from the generator."""
    leaves = [each.detach().requires_grad_() for each in given[:3]]
    outs = (*given.query.shape[:-1], given.value.size(-1))
    gradient = torch.linspace(-1, 1, outs[-1]).sin_().to(given.query.dtype).expand(outs).contiguous()

    def of(name: str) -> Way:
        def way() -> Sequence[Tensor]:
            with torch.enable_grad(), none_for_saved_tensors():
                out = ALGORITHMS[name](*leaves, given.mask, 0.0, given.is_causal, given.scale)
                return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

        return way

    def reference() -> Sequence[Tensor]:
        in_fp32 = [leaf.detach().float().requires_grad_() for leaf in leaves]
        mask = given.mask if given.mask is None or given.mask.dtype is torch.bool else given.mask.float()
        with torch.enable_grad(), none_for_saved_tensors():
            out = ALGORITHMS[TORCH](*in_fp32, mask, 0.0, given.is_causal, given.scale)
            return [out.detach(), *torch.autograd.grad(out, in_fp32, gradient.float())]

    return Ways({name: of(name) for name in possible}, TORCH, reference, _AS_EXACT)


def _key(given: Arguments) -> str:
    query, key, value = given[:3]
    sizes = [bucket(query.shape[:-3].numel()), *query.shape[-3:], "by", *key.shape[-3:], value.size(-1)]
    layouts = [layout(each) for each in given[:3]]
    flags = ["causal"] * given.is_causal + ["dropout"] * (given.dropout_p > 0)
    return " ".join(map(str, ["attention", *sizes, *layouts, *flags, _mask(given)])).rstrip()


def _mask(given: Arguments) -> str:
    return "" if given.mask is None else f"{str(given.mask.dtype).removeprefix('torch.')} mask"
