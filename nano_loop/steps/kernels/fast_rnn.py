"""Computes RNNs, GRUs and LSTMs by products over all steps and a recurrence in C."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from nano_loop.kernels.fp32 import by_guess
from nano_loop.kernels.replacement import Choose
from nano_loop.kernels.rnn import recurrence, rnn
from nano_loop.steps.kernels.kernel_step import KernelStep


class FastRnn(KernelStep):
    """Replaces torch's operators of recurrent layers, in the calls of set-up models and in their backward.

    torch composes a GRU, an RNN, and an LSTM of packed sequences or with a projection, of about ten operators a step.
    Other LSTMs are oneDNN's, which is faster for some shapes.
    """

    name = "fast_rnn"
    takes_fp32 = True
    replacements = rnn.REPLACEMENTS
    kernel = recurrence.KERNEL
    says = "recurrences in C, products over all steps"
    modules = (nn.RNN, nn.GRU, nn.LSTM)
    finds_all = True

    @property
    @override
    def rule(self) -> Choose:
        return by_guess
