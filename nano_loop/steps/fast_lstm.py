"""Computes the layers of LSTMs by large products and a C function for the recurrence, in reduced precision."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from nano_loop.intercept.operators import gives_kernels, overridden
from nano_loop.kernels import lstm, lstm_layer
from nano_loop.parts import Parts
from nano_loop.steps.step import Step


class FastLstm(Step):
    """Replaces oneDNN's LSTM in bf16, in the calls of set-up models and in their backward."""

    name = "fast_lstm"
    auto_is_for_reduced_precision = True

    @override
    def is_relevant(self, parts: Parts) -> bool:
        """Return whether the step was asked for, or a model has an LSTM: the others have no line."""
        return super().is_relevant(parts) and (self.required or any(map(_has_lstm, parts.models)))

    @override
    def skip_reason(self, parts: Parts) -> str | None:
        if not self.options.reduced_precision:
            return "it is for bf16"
        if not gives_kernels():
            return f"torch {torch.__version__} does not say which kernel an operator has; 2.9 and later do"
        return lstm_layer.unavailable()

    @override
    def apply(self, parts: Parts) -> str:
        for model in parts.models:
            self.interceptors.meet(model)
        if not self._overridden:
            self.undoing.enter_context(overridden(lstm.OPERATOR, lstm.for_set_up_models, "AutogradCPU"))
            self._overridden = True
        return "recurrences in C, by bf16 instructions" if lstm_layer.is_first_guess() else "in C where that is faster"

    _overridden = False


def _has_lstm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.LSTM) for module in model.modules())
