"""Runs in bf16 compute large products in blocks, unless the user names their operator; see also `tests/kernels`."""

import pytest
import torch
from torch import nn

from nano_loop import nano
from steps.kernels.cases import BY_NAME, use_for_all_sizes


@pytest.mark.parametrize("options", [{}, {"tune_operators": False, "fast_linear": True}])
def test_operators_that_are_named_keep_their_dtype(monkeypatch, options):
    use_for_all_sizes(monkeypatch, BY_NAME["fast_linear"])

    def loop(model, optimizer):
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.ones(96, 64)).dtype

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 40, bias=False))
    run = nano(precision="bf16", fp32_ops=["linear"], verbose=False, **options)(loop)
    assert run(model, torch.optim.SGD(model.parameters(), 0.1)) is torch.float32
