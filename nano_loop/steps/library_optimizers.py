"""Lets Adam and SGD of Keras and of fastai, which are none of torch's, update parameters by torch's fused kernels."""

from __future__ import annotations

from typing_extensions import override

from nano_loop.optimizers.clipping import clipped_in_c
from nano_loop.optimizers.library_steps import libraries_imported, library_steps_fused
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import Step


class LibraryOptimizers(Step):
    """Replaces the update of such optimizers where they train a set-up model, which comes without its optimizer.

    They are no `torch.optim.Optimizer`, so nobody can pass them, and the libraries name them in their own places.
    """

    name = "fused_optimizer"
    required = False  # the option is for optimizers of torch

    @override
    def is_relevant(self, parts: TrainingObjects) -> bool:
        return super().is_relevant(parts) and not parts.optimizers and bool(libraries_imported())

    @override
    def apply(self, parts: TrainingObjects) -> str:
        self.undoing.enter_context(library_steps_fused(parts.parameters()))
        self.undoing.enter_context(clipped_in_c(parts.parameters()))
        return f"Adam and SGD of {' and of '.join(libraries_imported())}"
