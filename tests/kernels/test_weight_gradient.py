"""The weight's gradient in blocks is as exact as torch's, for any shape, stride and number of threads."""

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_loop.kernels import build
from nano_loop.kernels.convolution import convolution, weight_gradient
from nano_loop.kernels.convolution.gradient_plans import Arguments, Plan, first_guess, for_blocks, plans

NHWC = torch.channels_last

pytestmark = pytest.mark.skipif(
    weight_gradient.KERNEL.unavailable is not None, reason=str(weight_gradient.KERNEL.unavailable)
)


@pytest.fixture(autouse=True, params=["AVX-512", *["AMX"] * weight_gradient.KERNEL.uses_amx])
def instructions(request, monkeypatch):
    """Have gradients computed by these instructions."""
    monkeypatch.setattr(weight_gradient.KERNEL, "uses_amx", request.param == "AMX")


def arguments(
    images=4,
    channels=16,
    outputs=16,
    size=(9, 9),
    kernel=(3, 3),
    stride=(1, 1),
    padding=(1, 1),
    dilation=(1, 1),
    transposed=False,
    mask=(False, True, True),
    seed=0,
):
    generator = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(shape, generator=generator).bfloat16().contiguous(memory_format=NHWC)

    inputs = some(images, channels, *size)
    weight = some(*((channels, outputs) if transposed else (outputs, channels)), *kernel)
    function = F.conv_transpose2d if transposed else F.conv2d
    out = function(inputs, weight, None, stride, padding, dilation=dilation)
    geometry = ([outputs], stride, padding, dilation, transposed, [0, 0], 1)
    return Arguments(some(*out.shape), inputs, weight, *geometry, mask)


def by_torch(*given):
    """torch's kernel."""
    return torch.ops.aten.convolution_backward(*given)


def gradients(given, weight="blocks", **options):
    return convolution._by_plan(convolution._supports(by_torch, *given), Plan(weight=weight), **options)


def exact(given):
    return by_torch(*(each.double() for each in given[:3]), *given[3:])[1]


def error(found, reference):
    return (found.double() - reference).square().mean().sqrt().item()


def assert_as_exact_as_torch(given):
    reference = exact(given)
    ours, torchs = gradients(given)[1], by_torch(*given)[1]
    assert ours.shape == torchs.shape
    # Where torch is exact by chance, on a few small numbers, an error of one rounding is allowed.
    rounding = 2**-9 * reference.square().mean().sqrt().item()
    assert error(ours, reference) <= max(1.2 * error(torchs, reference), rounding)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    images=st.integers(1, 7),
    channels=st.integers(8, 70),
    outputs=st.integers(8, 70),
    size=st.tuples(st.integers(5, 16), st.integers(5, 16)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    transposed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_is_as_exact_as_torch(transposed, padding, kernel, dilation, **sizes):
    if transposed:  # more padding than the kernel's reach would leave no output
        padding = tuple(min(p, d * (k - 1)) for p, k, d in zip(padding, kernel, dilation, strict=True))
    given = arguments(transposed=transposed, padding=padding, kernel=kernel, dilation=dilation, **sizes)
    assert "blocks" in {plan.weight for plan in plans(given)}
    assert_as_exact_as_torch(given)


@pytest.mark.parametrize(
    "sizes",
    [
        {"images": 16, "channels": 64, "outputs": 96, "size": (7, 7)},
        {"images": 4, "size": (60, 200)},
        {"images": 2, "size": (3, 400), "kernel": (1, 1), "padding": (0, 0)},
        {"images": 30, "channels": 40, "size": (1, 1), "kernel": (1, 1), "padding": (0, 0)},
        {"images": 6, "channels": 160, "outputs": 24, "size": (20, 20), "stride": (2, 2)},
    ],
)
@pytest.mark.parametrize("count", [1, 2, 5, 13])
def test_blocks_of_many_pixels_are_right_for_any_number_of_threads(threads, sizes, count):
    threads(count)
    given = arguments(**sizes)
    first = gradients(given)[1]
    assert_as_exact_as_torch(given)
    assert torch.equal(gradients(given)[1], first)  # the same for the same threads, though memory was used before


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    images=st.integers(1, 4),
    channels=st.integers(8, 70),
    outputs=st.integers(8, 40),
    size=st.tuples(st.integers(7, 12), st.integers(7, 12)),
    kernel=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    transposed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gradient_has_the_layout_of_its_weight(kernel, transposed, **sizes):
    given = arguments(kernel=kernel, transposed=transposed, **sizes)
    expected = gradients(given)[1]
    found = gradients(given._replace(weight=given.weight.contiguous()))[1]
    assert torch.equal(found, expected)
    assert expected.is_contiguous(memory_format=NHWC)
    assert found.is_contiguous() == (kernel[0] * kernel[1] <= 25)


def test_parts_of_larger_tensors_are_read_where_they_lie():
    given = arguments(images=6, channels=32, outputs=24)
    gradient = torch.full((6, 9, 12, 40), torch.nan).bfloat16().permute(0, 3, 1, 2)[:, 8:32, :, 2:11]
    inputs = torch.full((12, 9, 9, 50), torch.nan).bfloat16().permute(0, 3, 1, 2)[::2, 5:37]
    gradient.copy_(given.gradient), inputs.copy_(given.inputs)
    assert torch.equal(gradients(given._replace(gradient=gradient, inputs=inputs))[1], gradients(given)[1])


def test_numbers_that_are_not_finite_reach_their_weights_alone():
    given = arguments(images=3)
    given.gradient[2, 5] = torch.nan
    found = gradients(given)[1]
    assert found[5].isnan().all()
    assert not found[torch.arange(16) != 5].isnan().any()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    images=st.integers(1, 5),
    channels=st.integers(8, 70),
    outputs=st.integers(8, 70),
    size=st.tuples(st.integers(5, 12), st.integers(5, 12)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    transposed=st.booleans(),
    mask=st.tuples(st.booleans(), st.just(True), st.booleans()),
    seed=st.integers(0, 1000),
)
def test_numbers_in_fp32_are_rounded_and_sums_are_not(**sizes):
    given = arguments(**sizes)
    tensors = [tensor + 1e-3 * tensor.float() for tensor in given[:3]]  # no numbers in bf16
    found = gradients(given._replace(**dict(zip(given._fields, tensors, strict=False))), rounds_inputs=True)
    rounded = given._replace(**{name: tensor.bfloat16() for name, tensor in zip(given._fields, tensors, strict=False)})
    reference = exact(rounded)
    assert error(found[1], reference) <= 1e-5 * reference.square().mean().sqrt().item()
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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    images=st.integers(1, 5),
    channels=st.integers(1, 7),
    outputs=st.integers(8, 40),
    size=st.tuples(st.integers(9, 16), st.integers(9, 16)),
    kernel=st.tuples(st.integers(1, 4), st.integers(8, 9)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.just(1)),
    transposed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_few_channels_are_counted_with_the_columns_of_the_kernel(transposed, padding, kernel, dilation, **sizes):
    if transposed:
        padding = tuple(min(p, d * (k - 1)) for p, k, d in zip(padding, kernel, dilation, strict=True))
        sizes["channels"], sizes["outputs"] = sizes["outputs"], sizes["channels"]
    given = arguments(transposed=transposed, padding=padding, kernel=kernel, dilation=dilation, **sizes)
    assert "blocks" in {plan.weight for plan in plans(given)}
    assert_as_exact_as_torch(given)


OTHERS = {
    "NCHW": lambda given: given._replace(inputs=given.inputs.contiguous()),
    "gradient in NCHW": lambda given: given._replace(gradient=given.gradient.contiguous()),
    "groups": lambda given: given._replace(groups=2, weight=given.weight[:, :8]),
    "few channels": lambda given: arguments(channels=2),
    "few channels, with a dilation": lambda given: arguments(channels=7, dilation=(1, 2)),
    "few channels of more": lambda given: given._replace(inputs=arguments(channels=9).inputs[:, :7]),
    "few outputs": lambda given: arguments(outputs=7),
    "more images in the gradient": lambda given: given._replace(inputs=given.inputs[:2]),
    "a dilation of which bytes would overflow": lambda given: given._replace(dilation=(2**27, 1)),
    "no images": lambda given: given._replace(gradient=given.gradient[:0], inputs=given.inputs[:0]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_convolutions_are_not_computed_in_blocks(case):
    given = OTHERS[case](arguments())
    assert "blocks" not in {plan.weight for plan in plans(given)}
    assert first_guess(given).weight != "blocks"


def test_large_convolutions_are_the_first_guess_unless_amx_is_there_and_not_for_this_process(monkeypatch):
    large = arguments(images=8, channels=64, outputs=64, size=(20, 20))
    monkeypatch.setattr(weight_gradient.KERNEL, "is_first_guess", not weight_gradient.KERNEL.uses_amx)
    assert first_guess(large).weight == "blocks"
    assert first_guess(arguments()).weight != "blocks"
    assert first_guess(arguments(images=3, channels=64, outputs=64, size=(40, 40))).weight != "blocks"
    monkeypatch.setattr(weight_gradient.KERNEL, "is_first_guess", False)
    monkeypatch.setattr(weight_gradient.KERNEL, "uses_amx", False)
    assert first_guess(large).weight != "blocks"


def test_more_memory_than_the_bound_is_not_taken(monkeypatch):
    monkeypatch.setattr(weight_gradient, "SCRATCH_BOUND", 1)
    assert "blocks" not in {plan.weight for plan in plans(arguments())}


@pytest.mark.parametrize("transposed", [False, True])
def test_memory_is_as_large_as_the_kernel_says(threads, behind_memory, transposed):
    """What the kernel writes behind the end of its memory would be seen."""
    for count in (1, 3, 8):
        threads(count)
        for images, channels, outputs, size in ((5, 33, 70, (9, 13)), (9, 8, 200, (4, 4)), (2, 70, 9, (30, 30))):
            weight_gradient.weight_gradient(
                *for_blocks(arguments(images, channels, outputs, size, transposed=transposed))
            )
    assert len(behind_memory) == 18  # with the results
    assert all((each == 7).all() for each in behind_memory)


def test_without_a_compiler_the_gradient_is_torchs(monkeypatch):
    monkeypatch.setattr(weight_gradient.KERNEL, "unavailable", "no C compiler was found")
    assert "blocks" not in {plan.weight for plan in plans(arguments())}


def test_bounds_and_calls_are_those_of_the_c_file():
    source = (Path(build.__file__).parent / "csrc/weight_gradient.c").read_text()
    assert f"#define MOST_POSITIONS {weight_gradient._MOST_POSITIONS} " in source
    assert ctypes.sizeof(weight_gradient._Call) == 8 * (7 + 4 * 2 + 2 * 3 + 4 + 4)
