"""Dropout draws the plain loop's masks, but faster, wherever it is called."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop.kernels import bernoulli
from nano_loop.runtime.objects.training_objects import TrainingObjects
from steps.kernels.cases import BY_NAME

X = torch.ones(64, 1024)
DROPS = TrainingObjects([nn.Dropout(0.5)])

same_draws = pytest.mark.skipif(
    bernoulli.KERNEL.unavailable is not None, reason=f"fast masks: {bernoulli.KERNEL.unavailable}"
)


def dropped(p=0.25):
    torch.manual_seed(1)
    return F.dropout(X, p), torch.rand(2)


@same_draws
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_masks_are_the_plain_loops_during_the_run_and_drawn_fast(step, filled, options):
    plain = dropped()
    made = step(BY_NAME["fast_dropout"], **options)
    assert made.enabled
    assert made.skip_reason(DROPS) is None
    made.apply(DROPS)
    made.apply(DROPS)
    assert all(map(torch.equal, dropped(), plain))
    assert filled == [X.numel()]
    made.undo()
    dropped()
    assert filled == [X.numel()]
