"""Gradients of convolutions are torch's unless another way is faster, and plans match torch's; see `test_exactness`."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from kernels.compared.convolution_gradients import gradients, inputs, standing_in
from kernels.compared.convolutions import NHWC, arguments, by_torch, depthwise_case
from nano_loop.kernels.convolution import convolution, depthwise, gradient_plans

pytestmark = pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch does not hand out its kernels")


@pytest.fixture(autouse=True)
def every_size_is_worth_it(monkeypatch):
    monkeypatch.setattr(gradient_plans, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(gradient_plans, "MIN_ELEMENTS", 1)


@pytest.fixture
def in_force():
    with standing_in() as left:
        yield left


def test_other_groups_than_channels_have_no_depthwise_function(monkeypatch):
    assert depthwise.KERNEL.unavailable is None
    monkeypatch.setattr(depthwise, "MIN_ELEMENTS", 1)
    assert not depthwise.supports(*depthwise_case(channels=24), 12)


def test_bias_meets_a_gradient_that_is_a_slice_of_another(in_force):
    def joined(x, weight, bias):
        return torch.cat([x, F.conv_transpose2d(x, weight, bias)], 1).contiguous(memory_format=NHWC)

    tensors = inputs(outputs=8, kernel=(1, 1), transposed=True)
    ours, exact = gradients(joined, tensors), gradients(joined, tensors, torch.float64)
    torch.testing.assert_close(ours[2].double(), exact[2], rtol=0.01, atol=0.01)
    assert in_force[0] == (True, True, False)


TRANSPOSED = inputs(kernel=(2, 2), transposed=True)


def test_a_backward_inside_autocast_to_another_dtype_is_torchs(in_force):
    leaves = [each.clone().requires_grad_() for each in TRANSPOSED]
    out = F.conv_transpose2d(*leaves).float().square().sum()
    with torch.autocast("cpu", torch.float16):
        out.backward()
    assert in_force == [(True, True, True)]


def test_a_backward_inside_autocast_is_the_same(in_force):
    plain = gradients(F.conv_transpose2d, TRANSPOSED)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(F.conv_transpose2d, TRANSPOSED)
    assert all(itertools.starmap(torch.equal, zip(plain, inside, strict=True)))
    assert in_force == 2 * [(True, True, False)]


def test_compiled_callers_compute_the_same(in_force):
    eager = gradients(F.conv_transpose2d, TRANSPOSED)
    compiled = gradients(torch.compile(F.conv_transpose2d, backend="aot_eager"), TRANSPOSED)
    assert all(itertools.starmap(torch.equal, zip(eager, compiled, strict=True)))
    torch._dynamo.reset()


# --- plans ---


PLANNED = {
    "plain": {},
    "NCHW": {"layout": torch.contiguous_format},
    "few channels": {"channels": 3},
    "depthwise": {"groups": 8},
    "groups": {"groups": 2},
    "transposed": {"transposed": True},
    "transposed to an image": {"transposed": True, "outputs": 3},
    "frozen inputs": {"channels": 3, "mask": (False, True, True)},
    "frozen weight": {"groups": 8, "mask": (True, False, False)},
    "without bias": {"groups": 8, "mask": (True, True, False)},
}


@pytest.mark.parametrize("case", PLANNED)
def test_every_plan_gives_torch_s_gradients(case):
    given = arguments(**{"channels": 8, "outputs": 8, "mask": (True, True, True), **PLANNED[case]})
    call, theirs = convolution._supports(by_torch, *given), by_torch(*given)
    assert gradient_plans.Plan() in gradient_plans.plans(given)
    for plan in {*gradient_plans.plans(given), gradient_plans.first_guess(given)}:
        for ours, torchs, asked in zip(convolution._by_plan(call, plan), theirs, given.output_mask, strict=True):
            assert (ours is None) == (not asked)
            if asked:
                assert ours.dtype is torch.bfloat16
                assert (ours - torchs).float().norm() < 0.01 * torchs.float().norm(), plan
