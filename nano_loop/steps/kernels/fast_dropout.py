"""Draws dropout masks with vector instructions; torch's generator draws one element at a time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import nn
from typing_extensions import override

from nano_loop.kernels.dropout import bernoulli
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.kernels.kernel_step import KernelStep


class FastDropout(KernelStep):
    """Replaces `Tensor.bernoulli_` on the CPU during the run.

    Modules, functions such as `torch.nn.functional.dropout`, and attention with a `dropout_p` draw their masks by it,
    wherever they are called. Masks and all later random numbers are the same as in the plain loop. So the step applies
    to every model, in every precision, and code that was not set up draws the same numbers as without a run.
    """

    name = "fast_dropout"
    kernel = bernoulli.KERNEL
    says = "torch's own masks, drawn as vectors"
    calls_torchs_kernels = False
    auto_is_for_reduced_precision = False

    @classmethod
    @override
    def is_for(cls, model: nn.Module) -> bool:
        return True

    @override
    def apply(self, parts: TrainingObjects) -> str:
        return super().apply(TrainingObjects())  # nothing depends on which model draws

    @override
    def contexts(self) -> Iterable[AbstractContextManager[None]]:
        return [bernoulli.vectorized_draws()]
