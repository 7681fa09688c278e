"""Gradients of convolutions by plain products are as exact as oneDNN's, and torch computes what is not faster so."""

import functools
import itertools
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nano_loop.kernels.convolution import convolution as module
from nano_loop.kernels.convolution import depthwise, gradient_plans, weight_gradient
from nano_loop.patching.operators.operators import overridden
from nano_loop.patching.ownership import NO_RULES

NHWC = torch.channels_last
OPERATOR = "convolution_backward"

pytestmark = pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch does not hand out its kernels")


@pytest.fixture(autouse=True)
def every_size_is_worth_it(monkeypatch):
    monkeypatch.setattr(gradient_plans, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(gradient_plans, "MIN_ELEMENTS", 1)


@pytest.fixture
def in_force():
    """As `standing_in`, for a whole test."""
    with standing_in() as left:
        yield left


@contextmanager
def standing_in():
    """Put the products in the place of torch's kernel, and note what is still asked of that."""
    left = []

    def noting(original):
        """A kernel that notes its mask: whether the gradients of input, weight and bias are left to it."""

        def kernel(keys, *args):
            left.append(tuple(args[-1]))
            return original(keys, *args)

        return module.OVERRIDES[0]._replace(rules=lambda call: NO_RULES).make(kernel)

    with overridden(OPERATOR, noting, "CPU"):
        yield left


def inputs(images=3, channels=8, outputs=6, size=(9, 7), kernel=(3, 3), bias=True, transposed=False, groups=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    x = torch.randn(images, channels, *size, generator=generator).bfloat16()
    weight = torch.randn(*shape, *kernel, generator=generator).bfloat16()
    tensors = [x.contiguous(memory_format=NHWC) if x.dim() == 4 else x, weight]
    return [*tensors, torch.randn(outputs, generator=generator).bfloat16()] if bias else tensors


def gradients(function, tensors, dtype=torch.bfloat16, **kwargs):
    """Return the gradients of input, weight and bias, in fp64."""
    leaves = [each.to(dtype).requires_grad_() for each in tensors]
    out = function(*leaves, **kwargs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view(out.shape).to(torch.bfloat16)
    weight = torch.empty_like(out, dtype=torch.bfloat16).copy_(weight)
    return [each.double() for each in torch.autograd.grad(out, leaves, weight.to(dtype))]


def error(found, exact):
    return (found - exact).square().mean().sqrt().item()


def assert_as_exact_as_torch(function, tensors, **kwargs):
    """Hold the gradients to twice the error of torch's kernel; return what was left to that."""
    torchs, exact = gradients(function, tensors, **kwargs), gradients(function, tensors, torch.float64, **kwargs)
    with standing_in() as left:
        ours = gradients(function, tensors, **kwargs)
    for mine, theirs, reference in zip(ours, torchs, exact, strict=True):
        # Where torch is exact by chance, on a few small numbers, an error of one rounding is allowed.
        assert error(mine, reference) <= max(2 * error(theirs, reference), 2**-9 * reference.square().mean().sqrt())
    return left


CASES = {
    "3x3": ({}, {"padding": 1}),
    "no padding": ({}, {}),
    "no bias": ({"bias": False}, {"padding": 1}),
    "stride": ({}, {"stride": 2, "padding": 1}),
    "stride that leaves a rest": ({"size": (10, 10)}, {"stride": 3}),
    "other sides": ({"kernel": (1, 5), "size": (4, 11)}, {"stride": (1, 2), "padding": (0, 2)}),
    "dilation": ({"size": (11, 11)}, {"padding": 2, "dilation": (2, 1)}),
    "same": ({"size": (8, 8)}, {"padding": "same"}),
    "1x1": ({"kernel": (1, 1)}, {}),
    "1x1 stride": ({"kernel": (1, 1)}, {"stride": 2}),
    "1x1 padding": ({"kernel": (1, 1)}, {"padding": 1}),
    "patches": ({"kernel": (4, 4), "size": (8, 12)}, {"stride": 4}),
    "one pixel": ({"kernel": (1, 1), "size": (1, 1)}, {}),
    "one channel": ({"channels": 1, "outputs": 1}, {"padding": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_weight_and_bias_are_as_exact_as_torchs(case):
    shapes, kwargs = CASES[case]
    assert assert_as_exact_as_torch(F.conv2d, inputs(**shapes), **kwargs) == [(True, False, False)]


@settings(max_examples=40, deadline=None)
@given(
    images=st.integers(1, 5),
    channels=st.integers(2, 40),  # torch takes images of one channel for NCHW
    outputs=st.integers(2, 40),
    size=st.tuples(st.integers(5, 14), st.integers(5, 14)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    seed=st.integers(0, 1000),
)
def test_any_shape_is_as_exact_as_torch(images, channels, outputs, size, kernel, stride, padding, dilation, seed):
    tensors = inputs(images, channels, outputs, size, kernel, seed=seed)
    left = assert_as_exact_as_torch(F.conv2d, tensors, stride=stride, padding=padding, dilation=dilation)
    assert left == [(True, False, False)]


@pytest.mark.parametrize(("stride", "left"), [(2, []), (1, [(True, False, False)])])
def test_gradients_of_depthwise_convolutions_are_as_exact_as_torchs(monkeypatch, stride, left):
    monkeypatch.setattr(depthwise, "MIN_ELEMENTS", 1)
    tensors, geometry = inputs(channels=24, outputs=24, groups=24), {"groups": 24, "stride": stride, "padding": 1}
    assert assert_as_exact_as_torch(F.conv2d, tensors, **geometry) == left


def test_weights_gradients_of_depthwise_convolutions_in_fp32_are_as_exact_as_torchs(monkeypatch):
    monkeypatch.setattr(depthwise, "MIN_ELEMENTS", 1)
    tensors, geometry = inputs(channels=24, outputs=24, groups=24), {"groups": 24, "padding": 1}
    exact = gradients(F.conv2d, tensors, torch.float64, **geometry)
    with standing_in() as left:
        ours = gradients(F.conv2d, tensors, torch.float32, **geometry)
    assert left == [(True, False, False)]
    for mine, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


def test_greater_sums_are_as_exact_as_torchs():
    tensors = inputs(16, 64, 96, (7, 7))
    assert assert_as_exact_as_torch(F.conv2d, tensors, padding=1) == [(True, False, False)]


TRANSPOSED = {
    "1d": (F.conv_transpose1d, {"size": (9,), "kernel": (2,)}, {"stride": 2}),
    "2d": (F.conv_transpose2d, {"kernel": (2, 2)}, {"stride": 2}),
    "2d, padded": (F.conv_transpose2d, {}, {"stride": 2, "padding": 1, "output_padding": 1}),
    "2d, groups": (F.conv_transpose2d, {"groups": 2}, {"groups": 2}),
    "3d": (F.conv_transpose3d, {"size": (3, 4, 5), "kernel": (2, 2, 2)}, {"stride": 2}),
}


@pytest.mark.parametrize("case", TRANSPOSED)
def test_bias_of_a_transposed_convolution_is_a_sum(case):
    function, shapes, kwargs = TRANSPOSED[case]
    left = assert_as_exact_as_torch(function, inputs(**shapes, transposed=True), **kwargs)
    assert left == [(True, True, False)]


def test_bias_meets_a_gradient_that_is_a_slice_of_another(in_force):
    def joined(x, weight, bias):
        return torch.cat([x, F.conv_transpose2d(x, weight, bias)], 1).contiguous(memory_format=NHWC)

    tensors = inputs(outputs=8, kernel=(1, 1), transposed=True)
    ours, exact = gradients(joined, tensors), gradients(joined, tensors, torch.float64)
    torch.testing.assert_close(ours[2], exact[2], rtol=0.01, atol=0.01)
    assert in_force[0] == (True, True, False)


# The shapes, the settings, and which gradients are computed in fp32 and then left to torch.
DEPTHWISE = {"channels": 8, "outputs": 8, "groups": 8}
IN_FP32 = {
    "depthwise, stride": (DEPTHWISE, {"stride": 2, "groups": 8}, [(True, False, False), (False, True, True)]),
    "depthwise, 5x5": (
        {**DEPTHWISE, "kernel": (5, 5)},
        {"padding": 2, "groups": 8},
        [(False, True, False), (True, False, False)],
    ),
    "depthwise, 5x5, stride": (
        {**DEPTHWISE, "kernel": (5, 5)},
        {"stride": 2, "padding": 2, "groups": 8},
        [(True, True, False)],
    ),
    "depthwise, several outputs": (
        {**DEPTHWISE, "outputs": 16, "kernel": (5, 5)},
        {"groups": 8},
        [(False, True, False), (True, False, False)],
    ),
    "groups": ({"groups": 2}, {"padding": 1, "groups": 2}, [(False, True, False), (True, False, False)]),
}


@pytest.mark.parametrize("case", IN_FP32)
def test_gradients_of_groups_in_fp32_are_as_exact_as_torchs(monkeypatch, case):
    monkeypatch.setattr(gradient_plans, "_ELEMENTS_OF_GROUPS", 1)
    shapes, kwargs, left = IN_FP32[case]
    assert assert_as_exact_as_torch(F.conv2d, inputs(**shapes), **kwargs) == left


def test_gradient_of_a_transposed_convolutions_input_in_fp32_is_as_exact_as_torchs():
    x, weight, bias = inputs(outputs=3, transposed=True)
    left = assert_as_exact_as_torch(F.conv_transpose2d, [x.contiguous(), weight, bias], stride=2)
    assert left == [(True, False, False), (False, True, False)]


def test_gradients_of_few_elements_are_torchs(in_force, monkeypatch):
    shapes, kwargs, left = IN_FP32["depthwise, 5x5, stride"]
    for elements in (3 * 8 * 5 * 4, 3 * 8 * 5 * 4 + 1):
        monkeypatch.setattr(gradient_plans, "MIN_ELEMENTS", elements)
        gradients(F.conv2d, inputs(**shapes), **kwargs)
    assert in_force == [*left, (True, True, True)]


def test_depthwise_gradients_of_small_kernels_are_torchs():
    shapes = {**DEPTHWISE, "kernel": (3, 3)}
    assert assert_as_exact_as_torch(F.conv2d, inputs(**shapes), groups=8) == [(True, True, True)]


LEFT_TO_TORCH = {
    "fp32": (torch.float32, {}, {"padding": 1}),
    "fp64": (torch.float64, {}, {"padding": 1}),
    "groups": (torch.bfloat16, {"groups": 2}, {"padding": 1, "groups": 2}),
}


@pytest.mark.parametrize("case", LEFT_TO_TORCH)
def test_other_convolutions_are_torchs_to_the_bit(case):
    dtype, shapes, kwargs = LEFT_TO_TORCH[case]
    torchs = gradients(F.conv2d, inputs(**shapes), dtype, **kwargs)
    with standing_in() as left:
        ours = gradients(F.conv2d, inputs(**shapes), dtype, **kwargs)
    assert left == [(True, True, True)]
    assert all(itertools.starmap(torch.equal, zip(ours, torchs, strict=True)))


@pytest.mark.parametrize("which", [0, 1])
def test_images_that_are_not_in_nhwc_are_torchs(which, in_force):
    x, weight = inputs(bias=False)
    gradient = torch.ones(3, 6, 9, 7).bfloat16().contiguous(memory_format=NHWC)
    tensors = [gradient, x]
    tensors[which] = tensors[which].contiguous()
    torch.ops.aten.convolution_backward(*tensors, weight, [6], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3)
    assert in_force == [(True, True, True)]


def test_small_convolutions_are_torchs(in_force, monkeypatch):
    monkeypatch.setattr(gradient_plans, "MIN_MULTIPLICATIONS", 3 * 63 * 6 * 8 * 9 + 1)
    gradients(F.conv2d, inputs(), padding=1)
    monkeypatch.setattr(gradient_plans, "MIN_MULTIPLICATIONS", 3 * 63 * 6 * 8 * 9)
    gradients(F.conv2d, inputs(), padding=1)
    assert in_force == [(True, True, True), (True, False, False)]


@pytest.mark.parametrize(
    ("bound", "kernel", "at"), [("_PIXELS", 3, 189), ("_PIXELS_OF_1X1", 1, 189), ("_COLUMNS", 3, 189 * 72)]
)
def test_convolutions_of_many_pixels_are_torchs(in_force, monkeypatch, bound, kernel, at):
    tensors = inputs(kernel=(kernel, kernel))
    for value in (at - 1, at):
        monkeypatch.setattr(gradient_plans, bound, value)
        gradients(F.conv2d, tensors, padding=kernel // 2)
    assert in_force == [(True, True, True), (True, False, False)]


def test_a_frozen_weight_gets_no_product(in_force, monkeypatch):
    monkeypatch.setattr(module, "_weight_gradient", None)
    x, weight, bias = inputs()
    x.requires_grad_()
    F.conv2d(x, weight, bias, padding=1).float().square().sum().backward()
    assert in_force == [(True, False, False)]
    assert x.grad is not None


def test_an_input_without_a_gradient_asks_nothing_of_torch(in_force):
    x, weight, bias = inputs()
    leaves = [weight.requires_grad_(), bias.requires_grad_()]
    F.conv2d(x, weight, bias, padding=1).float().square().sum().backward()
    assert in_force == []
    assert all(each.grad is not None for each in leaves)


def test_a_backward_inside_autocast_to_another_dtype_is_torchs(in_force):
    x, weight, bias = (each.requires_grad_() for each in inputs())
    out = F.conv2d(x, weight, bias, padding=1).float().square().sum()
    with torch.autocast("cpu", torch.float16):
        out.backward()
    assert in_force == [(True, True, True)]


def test_a_backward_inside_autocast_is_the_same(in_force):
    plain = gradients(F.conv2d, inputs(), padding=1)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(F.conv2d, inputs(), padding=1)
    assert all(itertools.starmap(torch.equal, zip(plain, inside, strict=True)))
    assert in_force == 2 * [(True, False, False)]


def test_second_derivatives_are_torchs():
    def second(x, weight, bias):
        out = F.conv2d(x, weight, bias, padding=1)
        (first,) = torch.autograd.grad(out.float().square().sum(), weight, create_graph=True)
        return torch.autograd.grad(first.float().square().sum(), (x, weight))

    leaves = [each.requires_grad_() for each in inputs()]
    exact = second(*(each.detach().double().requires_grad_() for each in leaves))
    with standing_in() as left:
        ours = second(*leaves)
    assert (False, False, False) not in left
    for mine, reference in zip(ours, exact, strict=True):
        assert error(mine.double(), reference) < 0.02 * reference.square().mean().sqrt()


def test_functional_gradients_for_each_image_are_those_of_one_after_another(in_force):
    x, weight, bias = inputs()

    def loss(weight, image):
        return F.conv2d(image[None], weight, bias, padding=1).float().square().sum()

    batched = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
    singly = torch.stack([torch.func.grad(loss)(weight, image) for image in x])
    assert error(batched.double(), singly.double()) < 0.01 * singly.double().square().mean().sqrt()


def test_compiled_callers_compute_the_same(in_force):
    call = functools.partial(F.conv2d, padding=1)
    eager = gradients(call, inputs())
    compiled = gradients(torch.compile(call, backend="aot_eager"), inputs())
    assert all(itertools.starmap(torch.equal, zip(eager, compiled, strict=True)))
    torch._dynamo.reset()


def test_layers_of_a_model_get_gradients_of_their_dtype_and_shape(in_force):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 4, 2, 2)
    )
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(2, 3, 12, 12).contiguous(memory_format=NHWC))
    out.float().square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.dtype is torch.float32
        assert parameter.grad.shape == parameter.shape
    assert in_force == [(True, True, False), (True, False, False)]


# --- plans ---


def backward_arguments(
    images=4, channels=8, outputs=8, groups=1, transposed=False, mask=(True, True, True), size=9, layout=NHWC
):
    generator = torch.Generator().manual_seed(0)
    shape = (channels, outputs // groups) if transposed else (outputs, channels // groups)

    def some(*shape):
        return torch.randn(shape, generator=generator).bfloat16().contiguous(memory_format=layout)

    inputs, weight = some(images, channels, 9, 9), some(*shape, 3, 3)
    function = F.conv_transpose2d if transposed else F.conv2d
    out = function(inputs, weight, padding=1, groups=groups)
    geometry = ([outputs], [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    return gradient_plans.Arguments(some(*out.shape), inputs, weight, *geometry, mask)


def by_kernel(*given):
    """torch's kernel."""
    return torch.ops.aten.convolution_backward(*given)


def by_plan(given, plan):
    return module._by_plan(module._supports(by_kernel, *given), plan)


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
    given = backward_arguments(**PLANNED[case])
    theirs = by_kernel(*given)
    assert gradient_plans.Plan() in gradient_plans.plans(given)
    for plan in {*gradient_plans.plans(given), gradient_plans.first_guess(given)}:
        for ours, torchs, asked in zip(by_plan(given, plan), theirs, given.output_mask, strict=True):
            assert (ours is None) == (not asked)
            if asked:
                assert ours.dtype is torch.bfloat16
                assert (ours - torchs).float().norm() < 0.01 * torchs.float().norm(), plan


def test_products_are_for_nhwc_and_fp32_for_groups_and_few_channels():
    def weights(**case):
        return {plan.weight for plan in gradient_plans.plans(backward_arguments(**case))}

    blocks = {"blocks"} if weight_gradient.KERNEL.unavailable is None else set()
    assert weights() == {"torch", "product"} | blocks
    assert weights(layout=torch.contiguous_format) == {"torch"}
    assert weights(channels=4) == {"torch", "product", "fp32"} | blocks
    assert weights(groups=8) == {"torch", "fp32"}
    assert weights(transposed=True, outputs=3) == {"torch"} | blocks
    assert weights(mask=(True, False, False)) == {"torch"}
