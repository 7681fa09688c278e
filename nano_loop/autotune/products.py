"""Chooses how the products of linear layers and of their gradients are computed: by torch's kernel, or in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nano_loop.autotune.decisions import Decisions, decided
from nano_loop.autotune.remembered import Remembered
from nano_loop.autotune.sizes import MOST_ELEMENTS, bucket
from nano_loop.autotune.tuner import Tuner, Way, Ways
from nano_loop.kernels.linear.linear import BLOCKS, TORCH, Arguments, ByAlgorithm, Choose
from nano_loop.patching.torch_private import in_backward

#: Minimum number of rows of a result that are measured.
_FEWEST_ROWS = 64


def chooser(tuner: Tuner) -> Choose:
    """Return what `nano_loop.kernels.linear.linear` asks for a way."""
    of_layers = Decisions(tuner)
    of_gradients: Remembered[str] = Remembered(tuner)

    def choose(by_way: ByAlgorithm, given: Arguments, guess: str) -> str:
        key = (*((each.shape, each.stride()) for each in given[:2]), given.bias is not None)

        def measured() -> str | None:
            return tuner.choose(_key(given), guess, lambda: _ways(by_way, given))

        def stored() -> str | None:
            found = tuner.choices.get(_key(given))
            return None if found is None else found.way

        # A layer that an activation checkpoint calls again computes as in its forward; what is new is a gradient.
        if in_backward() and key not in of_layers:
            return of_gradients.way(key, guess, measured)
        return of_layers.way(key, lambda: guess, lambda: decided(guess, measured), stored)

    return choose


def _ways(by_way: ByAlgorithm, given: Arguments) -> Ways:
    """Return the ways. Of a vocabulary's layer, some rows are computed, since each way takes memory for its result."""
    rows = max(MOST_ELEMENTS // given.b.size(1), _FEWEST_ROWS)
    some = given._replace(a=given.a[:rows])

    def of(name: str) -> Way:
        def way() -> Sequence[Tensor]:
            with torch.no_grad():
                return [by_way(name, some)]

        return way

    return Ways({name: of(name) for name in (TORCH, BLOCKS)}, TORCH, None)


def _key(given: Arguments) -> str:
    """Return the key of a call, in which the number of rows of a batch, which is the depth of a gradient, is rough."""
    a, b, bias = given
    is_transposed = a.stride(1) != 1
    rows, depth = (a.size(0), bucket(a.size(1))) if is_transposed else (bucket(a.size(0)), a.size(1))
    order = f"{'T' if is_transposed else 'N'}{'N' if b.stride(1) == 1 else 'T'}"
    return f"product {rows} by {depth} by {b.size(1)} {order}{' plus a row' if bias is not None else ''}"
