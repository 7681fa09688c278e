"""Computes GRUs, RNNs, and LSTMs that are not oneDNN's in bf16, by products over all steps and a recurrence in C."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import nn
from typing_extensions import override

from nano_loop.kernels.rnn import recurrence, rnn
from nano_loop.steps.kernels.kernel_step import KernelStep


class FastRnn(KernelStep):
    """Replaces torch's operators of recurrent layers, in the calls of set-up models and in their backward.

    torch composes a GRU, an RNN, and an LSTM of packed sequences or with a projection, of about ten operators a step.
    Other LSTMs are oneDNN's, or those of `FastLstm`.
    """

    name = "fast_rnn"
    takes_fp32 = True
    replacements = rnn.REPLACEMENTS
    kernel = recurrence.KERNEL
    says = "recurrences in C, products over all steps"
    modules = (nn.RNN, nn.GRU, nn.LSTM)
    finds_all = True

    @override
    def contexts(self) -> Iterable[AbstractContextManager[None]]:
        of_lstms = () if self.options.fast_lstm is False else rnn.LSTM_REPLACEMENTS
        return [*super().contexts(), *(replacement.in_force() for replacement in of_lstms)]
