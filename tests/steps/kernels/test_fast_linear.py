"""Runs in bf16 compute large products in blocks; see also `tests/kernels`."""

import pytest
import torch
from torch import nn

from nano_loop import nano
from steps.kernels.cases import BY_NAME, use_for_all_sizes


@pytest.fixture(autouse=True)
def every_size_is_worth_it(monkeypatch):
    use_for_all_sizes(monkeypatch, BY_NAME["fast_linear"])


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, bias: torch.addmm(bias, a, b, beta=2),
        lambda a, b, bias: torch.addmm(bias, a, b, alpha=0.5),
        lambda a, b, bias: torch.addmm(bias.expand(64, 64).clone(), a, b),
        lambda a, b, bias: torch.addmm(bias[:1], a, b),
        lambda a, b, bias: torch.mm(a, b, out=torch.empty(64, 64).bfloat16().t()),
        lambda a, b, bias: torch.addmm(a[0], b, b, out=a),  # torch copies the bias first
        lambda a, b, bias: torch.mm(a[:, ::2], b[::2]),
        lambda a, b, bias: torch.mm(a[:1].expand(64, 64), b),
        lambda a, b, bias: torch.mm(a.float(), b.float()),
        lambda a, b, bias: torch.mm(a[:0], b),
    ],
)
def test_other_products_are_torchs_to_the_bit(called, call):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*sizes, generator=generator).bfloat16() for sizes in ((64, 64), (64, 64), (64,))]

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self):
            with torch.autocast("cpu", enabled=False):
                return call(*tensors)

    expected, model = call(*(each.clone() for each in tensors)), Calls()
    run = nano(precision="bf16", verbose=False, fast_linear=True)(lambda model, optimizer: model())
    assert torch.equal(run(model, torch.optim.SGD(model.parameters(), 0.1)), expected)
    assert not called


@pytest.mark.parametrize("options", [{}, {"tune_operators": False, "fast_linear": True}])
def test_operators_that_are_named_keep_their_dtype(options):
    def loop(model, optimizer):
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.ones(96, 64)).dtype

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 40, bias=False))
    run = nano(precision="bf16", fp32_ops=["linear"], verbose=False, **options)(loop)
    assert run(model, torch.optim.SGD(model.parameters(), 0.1)) is torch.float32
