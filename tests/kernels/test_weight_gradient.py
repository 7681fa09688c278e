"""The weight's gradient in blocks has the weight's layout, rounds fp32 values, and is the default if it pays off."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.compared.convolutions import NHWC, WEIGHT_GRADIENT, arguments, by_torch, gradients
from kernels.compared.oracle import drawn, pairs, rms
from nano_loop.kernels.convolution import convolution, weight_gradient
from nano_loop.kernels.convolution.gradient_plans import Plan

pytestmark = pytest.mark.skipif(
    weight_gradient.KERNEL.unavailable is not None, reason=str(weight_gradient.KERNEL.unavailable)
)


ANY_SIZES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True, params=["AVX-512", *["AMX"] * weight_gradient.KERNEL.uses_amx])
def instructions(request, monkeypatch):
    """Compute weight gradients with these instructions."""
    monkeypatch.setattr(weight_gradient.KERNEL, "uses_amx", request.param == "AMX")


@ANY_SIZES
@given(
    drawn(
        images=(1, 4),
        channels=(8, 70),
        outputs=(8, 40),
        size=pairs(7, 12),
        kernel=pairs(1, 6),
        transposed=[False, True],
        seed=(0, 1000),
    )
)
def test_gradient_has_the_layout_of_its_weight(sizes):
    given = arguments(**sizes)
    expected = gradients(given)[1]
    found = gradients(given._replace(weight=given.weight.contiguous()))[1]
    assert torch.equal(found, expected)
    assert expected.is_contiguous(memory_format=NHWC)
    assert found.is_contiguous() == (math.prod(sizes["kernel"]) <= 25)


def test_parts_of_larger_tensors_are_read_where_they_lie():
    given = arguments(images=6, channels=32, outputs=24)
    gradient = torch.full((6, 9, 12, 40), torch.nan).bfloat16().permute(0, 3, 1, 2)[:, 8:32, :, 2:11]
    inputs = torch.full((12, 9, 9, 50), torch.nan).bfloat16().permute(0, 3, 1, 2)[::2, 5:37]
    gradient.copy_(given.gradient), inputs.copy_(given.inputs)
    assert torch.equal(gradients(given._replace(gradient=gradient, inputs=inputs))[1], gradients(given)[1])


@ANY_SIZES
@given(
    drawn(
        images=(1, 5),
        channels=(8, 70),
        outputs=(8, 70),
        size=pairs(5, 12),
        stride=pairs(1, 3),
        mask=st.tuples(st.booleans(), st.just(True), st.booleans()),
        transposed=[False, True],
        seed=(0, 1000),
    )
)
def test_numbers_in_fp32_are_rounded_and_sums_are_not(sizes):
    given = arguments(**sizes)
    tensors = [tensor + 1e-3 * tensor.float() for tensor in given[:3]]  # not representable in bf16
    found = gradients(given._replace(**dict(zip(given._fields, tensors, strict=False))), rounds_inputs=True)
    rounded = given._replace(**{name: tensor.bfloat16() for name, tensor in zip(given._fields, tensors, strict=False)})
    (reference,) = WEIGHT_GRADIENT.of_fp64(rounded)
    assert rms(found[1].double() - reference) <= 1e-5 * rms(reference)
    assert all(each is None or each.dtype is torch.float32 for each in found)
    if found[0] is not None:
        assert torch.equal(found[0], by_torch(*rounded)[0].float())
    if found[2] is not None:
        assert torch.equal(found[2], tensors[0].sum([0, 2, 3]))


def test_the_bias_is_the_sum_of_the_gradient_and_nothing_is_asked_of_torch():
    given = arguments(images=4)

    def not_called(*given):
        raise AssertionError("torch's kernel was called")

    _, _, bias = convolution._by_plan(convolution._supports(not_called, *given), Plan(weight="blocks"))
    assert torch.equal(bias, given.gradient.sum([0, 2, 3]))
