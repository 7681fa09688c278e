"""Chooses how the layers of LSTMs are computed: by oneDNN, or by large products and a C function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nano_loop.autotune.decisions import Decisions, decided
from nano_loop.autotune.hooks import none_for_saved_tensors
from nano_loop.autotune.sizes import MOST_ELEMENTS, bucket, most_elements
from nano_loop.autotune.tuner import Tuner, Way, Ways
from nano_loop.kernels.rnn.lstm import BLOCKS, TORCH, ByTorch, Choose
from nano_loop.kernels.rnn.lstm_layer import GATES, Arguments, States, lstm

#: Number of steps that are measured, or of multiplications if that is more steps: what a call takes besides should not
#: decide.
_SOME_STEPS, _ENOUGH = 16, 1 << 26


def chooser(tuner: Tuner) -> Choose:
    """Return what `nano_loop.kernels.rnn.lstm` asks for a way."""
    decisions = Decisions(tuner)

    def choose(by_torch: ByTorch, given: Arguments, guess: str) -> str:
        key = (*((tensor.shape, tensor.stride()) for tensor in given.tensors), given.is_reversed)

        def measured() -> str | None:
            if most_elements(_some_steps(given).tensors) * GATES > MOST_ELEMENTS:
                return guess
            return tuner.choose(_key(given), guess, lambda: _ways(by_torch, _some_steps(given)))

        def stored() -> str | None:
            found = tuner.choices.get(_key(given))
            return None if found is None else found.way

        return decisions.way(key, lambda: guess, lambda: decided(guess, measured), stored)

    return choose


def _some_steps(given: Arguments) -> Arguments:
    of_a_step = given.inputs.size(1) * (given.input_weight.numel() + given.hidden_weight.numel())
    return given._replace(inputs=given.inputs[: max(_SOME_STEPS, _ENOUGH // of_a_step)])


def _ways(by_torch: ByTorch, some: Arguments) -> Ways:
    """Return the ways to compute a layer and its gradients."""
    shape = (*some.inputs.shape[:2], some.output.size(1))
    gradient = torch.linspace(-1, 1, shape[-1]).sin_().expand(shape).contiguous()

    def of(compute: ByTorch, dtype: torch.dtype) -> Way:
        def way() -> Sequence[Tensor]:
            leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in some.tensors]
            wanted = leaves if some.biases else leaves[:3]  # where there are no biases, the weights stand there again
            with torch.enable_grad(), none_for_saved_tensors():
                outputs = compute(leaves)[0]
                return [outputs.detach(), *torch.autograd.grad(outputs, wanted, gradient.to(dtype))]

        return way

    def ours(leaves: Sequence[Tensor]) -> States:
        inputs, input_weight, hidden_weight, *biases, output, cells = leaves
        given = tuple(biases) if some.biases else ()
        return lstm(Arguments(inputs, input_weight, hidden_weight, given, output, cells, some.is_reversed))

    ways = {TORCH: of(by_torch, torch.bfloat16), BLOCKS: of(ours, torch.bfloat16)}
    return Ways(ways, TORCH, of(by_torch, torch.float32))


def _key(given: Arguments) -> str:
    steps, batch, size = given.inputs.shape
    flags = ["biases"] * bool(given.biases) + ["reversed"] * given.is_reversed
    return " ".join(map(str, ["lstm", bucket(steps), bucket(batch), size, given.output.size(1), *flags]))
