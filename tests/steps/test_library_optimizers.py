"""Models that no optimizer of torch trains have gradients that are clipped as those of others."""

import pytest
import torch
from torch import nn

from nano_loop.kernels.gradient_clipping import KERNEL
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.library_optimizers import LibraryOptimizers


@pytest.mark.skipif(KERNEL.unavailable is not None, reason=str(KERNEL.unavailable))
def test_gradients_are_clipped_in_c_until_the_run_ends(step):
    model = nn.Linear(3, 2)
    made = step(LibraryOptimizers)
    made.apply(TrainingObjects([model]))
    calls = KERNEL.calls
    for _ in range(2):
        model.weight.grad = torch.ones(2, 3)
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.5).item() == pytest.approx(6**0.5)
        torch.testing.assert_close(model.weight.grad, torch.full((2, 3), 0.5 / 6**0.5))
        made.undo()
    assert KERNEL.calls == calls + 1
