"""Inside `disable_casts` everything is computed in fp32."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop import disable_casts, nano
from nano_loop.precision.autocast.autocast import cpu_autocast

X = torch.linspace(-1, 1, 12).reshape(3, 4)
WEIGHT = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: F.linear(x, WEIGHT),
        lambda x: x @ WEIGHT.T,
        lambda x: torch.matmul(WEIGHT, x.T),
        lambda x: x + x,
        lambda x: 1 / (x * x + 1),
        lambda x: x.var(),
        lambda x: F.layer_norm(x, (4,)),
        lambda x: x.softmax(-1).log(),
        lambda x: F.conv1d(x.unsqueeze(0), torch.ones(1, 3, 2)),
        lambda x: torch.cat([x, x]),
        lambda x: nn.Linear(4, 2)(x),
        lambda x: nn.LSTM(4, 2)(x)[0],
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    ],
)
def test_bf16_from_outside_is_computed_with_in_fp32(compute):
    outside = X.bfloat16()
    torch.manual_seed(0)
    expected = compute(outside.float())
    torch.manual_seed(0)
    with cpu_autocast(torch.bfloat16), disable_casts():
        inside = compute(outside)
    assert inside.dtype is torch.float32
    assert torch.equal(inside, expected)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize(
    "compute",
    [
        lambda h: F.normalize(h),
        lambda h: torch.norm(h, dim=1),
        lambda h: torch.tensordot(h, WEIGHT.T, 1),
        lambda h: torch.zeros(4).put_(torch.arange(4), h[0]),
        lambda h: torch.zeros(3, 4).index_reduce_(0, torch.arange(3), h, "amax"),
        lambda h: torch.zeros(3, 3).addmm_(h, h.T),
        lambda h: torch.mm(h, WEIGHT.T, out=torch.empty(3, 2)),
    ],
)
def test_functions_with_out_and_in_place_compute_in_fp32_too(compute):
    with disable_casts():
        inside = compute(X.bfloat16())
    assert inside.dtype is torch.float32
    torch.testing.assert_close(inside, compute(X.bfloat16().float()))


def test_it_may_be_nested_and_autocast_goes_on_behind_it_and_an_exception():
    with cpu_autocast(torch.bfloat16):
        with disable_casts():
            with contextlib.suppress(ZeroDivisionError), disable_casts():
                raise ZeroDivisionError
            assert F.linear(X.bfloat16(), WEIGHT).dtype is torch.float32
        assert F.linear(X, WEIGHT).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_writes_in_place_reach_the_tensor_itself():
    tensor = X.bfloat16()
    with disable_casts():
        tensor.add_(1)
        tensor[0] = 5
        assert tensor.dtype is torch.bfloat16
    assert torch.equal(tensor, (X.bfloat16() + 1).index_fill(0, torch.tensor([0]), 5))


def test_it_decorates_functions_and_methods():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.scored(self.layer(x))

        @disable_casts()
        def scored(self, hidden):
            seen.append((hidden.dtype, self.layer(hidden).dtype))
            return self.layer(hidden)

    seen = []
    train = nano(precision="bf16", verbose=False)(lambda model: model(X).sum().backward())
    train(Model())
    assert seen == [(torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("precision", [32, "bf16", "bf16-true"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_it_may_surround_an_optimizer_s_step(precision, kind):
    def train(model, optimizer, around):
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            with around():
                optimizer.step()

    found = []
    for around in (contextlib.nullcontext, disable_casts):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        nano(precision=precision, verbose=False)(train)(model, kind(model.parameters()), around)
        found.append(model.weight.detach())
    assert torch.equal(*found)
