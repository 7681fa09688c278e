"""Convolutions by AMX round what they multiply and nothing else, for any shape, stride and number of threads."""

import ctypes
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from nano_loop import accelerated
from nano_loop.kernels.convolution import blocked_convolution as module
from nano_loop.kernels.convolution.weight_gradient import Geometry
from nano_loop.patching.operators.operators import gives_kernels

NHWC = torch.channels_last

pytestmark = pytest.mark.skipif(not module.KERNEL.uses_amx, reason="the CPU has no AMX")


class Case(NamedTuple):
    """A convolution, and its result in float64 with rounded factors."""

    inputs: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    geometry: Geometry

    @property
    def exact(self):
        bias = None if self.bias is None else self.bias.double()
        _, *geometry = self.geometry
        return F.conv2d(rounded(self.inputs), rounded(self.weight), bias, *geometry)


def rounded(tensor):
    return tensor.bfloat16().double()


def case(
    images=3,
    channels=20,
    outputs=24,
    size=(9, 11),
    kernel=(3, 3),
    stride=(1, 1),
    padding=(1, 1),
    dilation=(1, 1),
    weight_in_nhwc=False,
    with_bias=False,
    seed=0,
):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(images, channels, *size, generator=generator).contiguous(memory_format=NHWC)
    weight = torch.randn(outputs, channels, *kernel, generator=generator)
    if weight_in_nhwc:
        weight = weight.contiguous(memory_format=NHWC)
    bias = torch.randn(outputs, generator=generator) if with_bias else None
    return Case(inputs, weight, bias, Geometry(kernel, stride, padding, dilation))


def assert_equal_but_for_the_order_of_sums(computed, exact):
    assert computed.dtype is torch.float32
    assert computed.shape == exact.shape
    assert (computed.double() - exact).abs().max() <= 1e-5 * exact.abs().max()


def assert_gradient_is_exact(made, gradient):
    places = made.inputs.shape[2:]
    assert module.supports_gradient(gradient, made.weight, made.geometry, places)
    _, *geometry = made.geometry
    numbers = ([0], *geometry, False, [0, 0], 1, (True, False, False))
    exact = torch.ops.aten.convolution_backward(
        rounded(gradient), made.inputs.double(), rounded(made.weight), *numbers
    )[0]
    computed = module.input_gradient(gradient, made.weight, made.geometry, places)
    assert_equal_but_for_the_order_of_sums(computed, exact)


SIZES = {
    "images": st.integers(1, 5),
    "channels": st.integers(16, 70),
    "outputs": st.integers(16, 70),
    "size": st.tuples(st.integers(5, 17), st.integers(5, 17)),
    "kernel": st.tuples(st.integers(1, 3), st.integers(1, 3)),
    "padding": st.tuples(st.integers(0, 2), st.integers(0, 2)),
    "dilation": st.tuples(st.integers(1, 2), st.integers(1, 2)),
    "weight_in_nhwc": st.booleans(),
    "seed": st.integers(0, 1000),
}
EACH = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@EACH
@given(
    count=st.sampled_from([1, 2, 5]),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    with_bias=st.booleans(),
    **SIZES,
)
def test_any_shape_is_exact_but_for_the_rounding_of_its_factors(threads, count, **sizes):
    threads(count)
    made = case(**sizes)
    places = made.exact.shape[2:]
    assert module.supports(made.inputs, made.weight, made.geometry, places)
    computed = module.convolution(made.inputs, made.weight, made.bias, made.geometry, places)
    assert_equal_but_for_the_order_of_sums(computed, made.exact)


@EACH
@given(count=st.sampled_from([1, 2, 5]), **SIZES)
def test_gradient_of_the_inputs_is_as_exact(threads, count, padding, kernel, dilation, **sizes):
    threads(count)
    padding = tuple(min(p, d * (k - 1)) for p, k, d in zip(padding, kernel, dilation, strict=True))
    made = case(padding=padding, kernel=kernel, dilation=dilation, **sizes)
    gradient = torch.randn(made.exact.shape).contiguous(memory_format=NHWC)
    assert_gradient_is_exact(made, gradient)


@EACH
@given(
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    **{name: sizes for name, sizes in SIZES.items() if name not in ("kernel", "padding", "dilation")},
)
def test_gradient_of_a_kernel_of_one_position_may_have_a_stride(**sizes):
    made = case(kernel=(1, 1), padding=(0, 0), **sizes)
    assert_gradient_is_exact(made, torch.randn(made.exact.shape).contiguous(memory_format=NHWC))


@pytest.mark.parametrize(
    "sizes",
    [
        {"images": 16, "channels": 512, "outputs": 40, "size": (7, 7)},
        {"images": 2, "channels": 16, "size": (60, 200)},
        {"images": 1, "channels": 300, "size": (40, 40), "stride": (2, 2)},
        {"images": 30, "channels": 40, "size": (1, 1), "kernel": (1, 1), "padding": (0, 0)},
    ],
)
def test_many_blocks_are_right_and_do_not_depend_on_the_number_of_threads(threads, sizes):
    made = case(**sizes)
    places = made.exact.shape[2:]
    computed = []
    for count in (1, 2, 5, 13):
        threads(count)
        computed.append(module.convolution(made.inputs, made.weight, None, made.geometry, places))
    assert_equal_but_for_the_order_of_sums(computed[0], made.exact)
    assert all(torch.equal(each, computed[0]) for each in computed)


def test_parts_of_larger_tensors_are_read_where_they_lie():
    made = case(images=4, channels=32)
    inputs = torch.full((8, 9, 11, 50), torch.nan).permute(0, 3, 1, 2)[::2, 5:37]
    inputs.copy_(made.inputs)
    weight = torch.full((24, 40, 3, 3), torch.nan)[:, 8:]
    weight.copy_(made.weight)
    computed, expected = (
        module.convolution(*tensors, None, made.geometry, (9, 11))
        for tensors in ((inputs, weight), (made.inputs, made.weight))
    )
    assert torch.equal(computed, expected)


def test_numbers_that_are_not_finite_reach_the_pixels_around_them_alone():
    made = case()
    made.inputs[1, 3, 4, 5] = torch.inf
    computed = module.convolution(made.inputs, made.weight, None, made.geometry, (9, 11))
    reached = torch.zeros_like(computed, dtype=torch.bool)
    reached[1, :, 3:6, 4:7] = True
    assert torch.equal(~computed.isfinite(), reached)


OTHERS = {
    "NCHW": lambda made: made._replace(inputs=made.inputs.contiguous()),
    "few channels": lambda made: case(channels=15),
    "few outputs": lambda made: case(outputs=15),
    "inputs in bf16": lambda made: made._replace(inputs=made.inputs.bfloat16()),
    "weight in bf16": lambda made: made._replace(weight=made.weight.bfloat16()),
    "a dilation of which bytes would overflow": lambda made: made._replace(
        geometry=made.geometry._replace(dilation=(2**27, 1))
    ),
    "no images": lambda made: made._replace(inputs=made.inputs[:0]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_convolutions_are_not_computed_in_blocks(other):
    made = OTHERS[other](case())
    assert not module.supports(made.inputs, made.weight, made.geometry, (9, 11))


def test_weights_whose_places_would_overflow_are_not_computed_in_blocks(monkeypatch):
    made = case()
    monkeypatch.setattr(module, "_FARTHEST_OUTPUT", made.weight.stride(0) - 1)
    assert not module.supports(made.inputs, made.weight, made.geometry, (9, 11))


@pytest.mark.parametrize("change", [{"stride": (2, 1)}, {"padding": (3, 3)}])
def test_other_gradients_are_not_computed_in_blocks(change):
    made = case(**change)
    assert not module.supports_gradient(torch.randn(made.exact.shape), made.weight, made.geometry, (9, 11))


def test_memory_is_as_large_as_the_kernel_says(threads, behind_memory):
    """What the kernel writes behind the end of its memory would be seen."""
    for count in (1, 3, 8):
        threads(count)
        for sizes in ({"images": 5, "channels": 33, "size": (9, 13)}, {"images": 2, "channels": 70, "size": (30, 30)}):
            made = case(**sizes)
            module.convolution(made.inputs, made.weight, None, made.geometry, sizes["size"])
    assert len(behind_memory) == 12  # with the results
    assert all((each == 7).all() for each in behind_memory)


@pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")
def test_models_that_round_have_their_convolutions_and_gradients_in_blocks(called):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 64, 3, 2, padding=1))
    x = torch.randn(24, 32, 32, 32)
    options = {"precision": "bf16-products", "channels_last": True, "tune_operators": False, "verbose": False}
    expected = model(x)
    with accelerated(model, **options):
        out = model(x.clone().requires_grad_())
        out.backward(torch.randn(out.shape).contiguous(memory_format=NHWC))
    assert (out - expected).norm() < 0.01 * expected.norm()
    # Both forwards, and the inputs' gradient of the one without a stride.
    assert called.count("convolution") == 3
    assert called.count("weight_gradient") == 2


def test_calls_are_those_of_the_c_file():
    assert ctypes.sizeof(module._Call) == 8 * (7 + 4 * 2 + 2 * 3 + 4)
