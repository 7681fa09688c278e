"""Computes the layers of LSTMs by large products and a C function for the recurrence, in reduced precision."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from nano_loop.kernels.rnn import lstm, lstm_layer
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.kernels.kernel_step import KernelStep


class FastLstm(KernelStep):
    """Replaces oneDNN's LSTM in bf16, in the calls of set-up models and in their backward."""

    name = "fast_lstm"
    replacements = lstm.REPLACEMENTS
    kernel = lstm_layer.KERNEL
    says = "recurrences in C, by bf16 instructions"
    finds_all = True

    @staticmethod
    @override
    def is_for(model: nn.Module) -> bool:
        return any(isinstance(module, nn.LSTM) for module in model.modules())

    @override
    def apply(self, parts: TrainingObjects) -> str:
        detail = super().apply(parts)
        return detail if self.kernel.is_first_guess else "in C where that is faster"
