"""Gradients of convolutions, in NHWC."""

import functools

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from kernels.compared.oracle import Row, at_least, drawn, pairs, rms
from nano_loop.kernels.convolution import convolution, depthwise, weight_gradient
from nano_loop.kernels.convolution.gradient_plans import Arguments, Plan, for_blocks, plans
from nano_loop.kernels.convolution.weight_gradient import Geometry

NHWC = torch.channels_last
STRIDES, SEEDS = pairs(1, 3), (0, 1000)
OF_KERNEL = {"kernel": pairs(1, 3), "padding": pairs(0, 2), "dilation": pairs(1, 2), "seed": SEEDS}


def within_reach(sizes):
    """Return sizes whose padding is at most the kernel's reach; more would leave no output."""
    numbers = zip(sizes["padding"], sizes["kernel"], sizes["dilation"], strict=True)
    return sizes | {"padding": tuple(min(p, d * (k - 1)) for p, k, d in numbers)}


def some(generator, *shape, layout=NHWC):
    return torch.randn(shape, generator=generator).contiguous(memory_format=layout)


def replaced(call, place, change):
    return tuple(change(each) if number == place else each for number, each in enumerate(call))


# --- the weight's gradient, in bf16 ---


def arguments(
    images=4, channels=16, outputs=16, size=(9, 9), kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1),
    transposed=False, groups=1, mask=(False, True, True), layout=NHWC, seed=0,
):  # fmt: skip
    """Return the arguments of torch's kernel."""
    generator = torch.Generator().manual_seed(seed)
    inputs = some(generator, images, channels, *size, layout=layout).bfloat16()
    shape = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    weight = some(generator, *shape, *kernel, layout=layout).bfloat16()
    function = F.conv_transpose2d if transposed else F.conv2d
    out = function(inputs, weight, None, stride, padding, dilation=dilation, groups=groups)
    geometry = ([outputs], stride, padding, dilation, transposed, [0, 0], groups)
    return Arguments(some(generator, *out.shape, layout=layout).bfloat16(), inputs, weight, *geometry, mask)


def by_torch(*given):
    return torch.ops.aten.convolution_backward(*given)


def gradients(given, weight="blocks", **options):
    return convolution._by_plan(convolution._supports(by_torch, *given), Plan(weight=weight), **options)


def nan_in_one_channel():
    given = arguments(images=3)
    given.gradient[2, 5] = torch.nan
    return given


def few(sizes):
    """Return sizes with few channels, which are the outputs of a transposed convolution."""
    if sizes["transposed"]:
        sizes = sizes | {"channels": sizes["outputs"], "outputs": sizes["channels"]}
    return reachable(sizes)


def reachable(sizes):
    return within_reach(sizes) if sizes["transposed"] else sizes


of_weight = functools.partial(
    Row,
    make=arguments,
    ours=lambda given: gradients(given)[1:2],
    torchs=lambda given: by_torch(*given)[1:2],
    bound=at_least(1.2),
    supports=lambda given: "blocks" in {plan.weight for plan in plans(given)},
    kernel=weight_gradient.KERNEL,
)
WEIGHT_GRADIENT = of_weight(
    sizes=drawn(
        images=(1, 7),
        channels=(8, 70),
        outputs=(8, 70),
        size=pairs(5, 16),
        **{"stride": STRIDES, "transposed": [False, True], **OF_KERNEL},
    ).map(reachable),
    large=[
        {"images": 16, "channels": 64, "outputs": 96, "size": (7, 7)},
        {"images": 4, "size": (60, 200)},
        {"images": 2, "size": (3, 400), "kernel": (1, 1), "padding": (0, 0)},
        {"images": 30, "channels": 40, "size": (1, 1), "kernel": (1, 1), "padding": (0, 0)},
        {"images": 6, "channels": 160, "outputs": 24, "size": (20, 20), "stride": (2, 2)},
    ],
    threads=(1, 2, 5, 13),
    same_bits=False,
    ends=[
        {"images": images, "channels": channels, "outputs": outputs, "size": size, "transposed": transposed}
        for images, channels, outputs, size in ((5, 33, 70, (9, 13)), (9, 8, 200, (4, 4)), (2, 70, 9, (30, 30)))
        for transposed in (False, True)
    ],
    behind=lambda given: weight_gradient.weight_gradient(*for_blocks(given)),
    memories=2,
    others={
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
    },
    undefined={"NaN in one channel": nan_in_one_channel},
)
#: The few channels are combined with the kernel's columns.
WEIGHT_GRADIENT_OF_FEW_CHANNELS = of_weight(
    sizes=drawn(
        images=(1, 5),
        channels=(1, 7),
        outputs=(8, 40),
        size=pairs(9, 16),
        stride=STRIDES,
        kernel=st.tuples(st.integers(1, 4), st.integers(8, 9)),
        padding=st.tuples(st.integers(0, 2), st.integers(0, 3)),
        dilation=st.tuples(st.integers(1, 2), st.just(1)),
        transposed=[False, True],
        seed=SEEDS,
    ).map(few)
)

# --- depthwise convolutions, in fp32 and in bf16 ---


def depthwise_case(
    images=2, channels=24, sizes=(9, 12), kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1),
    dtype=torch.float32, seed=0,
):  # fmt: skip
    """Return the gradient of the output, input, weight and geometry."""
    generator = torch.Generator().manual_seed(seed)
    x = some(generator, images, channels, *sizes).to(dtype)
    weight = torch.randn(channels, 1, *kernel, generator=generator).to(dtype)
    shape = F.conv2d(x, weight, None, stride, padding, dilation, channels).shape
    return some(generator, *shape).to(dtype), x, weight, Geometry(kernel, stride, padding, dilation)


def depthwise_by_torch(call):
    gradient, x, weight, (_, *geometry) = call
    numbers = (None, *map(list, geometry), False, [0, 0], x.size(1), [True, True, False])
    return torch.ops.aten.convolution_backward(gradient, x, weight, *numbers)[:2]


def with_outputs(given):
    """Return sizes with the padding that the kernel needs."""
    reach = [(k - 1) * d + 1 for k, d in zip(given["kernel"], given["dilation"], strict=True)]
    numbers = zip(given["padding"], reach, given["sizes"], strict=True)
    return given | {"padding": tuple(max(p, (r - size + 1) // 2) for p, r, size in numbers)}


def has_the_layout_of_inputs_and_weight(call, ours, torchs):
    (of_x, of_weight), (_, x, weight, _) = ours, call
    assert (of_x.dtype, of_x.stride()) == (x.dtype, x.stride())
    assert (of_weight.dtype, of_weight.shape) == (torch.float32, weight.shape)


def pairs_of(*numbers):
    return st.tuples(*[st.sampled_from(numbers)] * 2)


DEPTHWISE = Row(
    make=depthwise_case,
    ours=lambda call: (depthwise.input_gradient(*call), depthwise.weight_gradient(*call[:2], call[3])),
    torchs=depthwise_by_torch,
    bound=lambda theirs, truth, call, place: (
        (3e-3 if place == 0 and call[0].dtype is torch.bfloat16 else 1e-6) * rms(truth)
    ),
    also=has_the_layout_of_inputs_and_weight,
    sizes=drawn(
        images=[1, 2, 5, 17],
        channels=[16, 24, 40, 72, 100, 160],
        sizes=pairs_of(7, 9, 12, 15),
        kernel=st.tuples(st.sampled_from([1, 2, 3, 5, 7]), st.sampled_from([3, 5, 7])),
        stride=pairs_of(1, 2, 3),
        padding=pairs_of(0, 1, 2, 3),
        dilation=pairs_of(1, 2),
        dtype=[torch.float32, torch.bfloat16],
        seed=(0, 99),
    ).map(with_outputs),
    large=[
        {"images": 3, "channels": 40, "sizes": (33, 20), "dtype": dtype} for dtype in (torch.float32, torch.bfloat16)
    ],
    ends=[{"channels": 40, "dtype": torch.bfloat16}],
    supports=lambda call: depthwise.supports(*call, call[1].size(1)),
    others={
        "few channels": lambda call: depthwise_case(channels=8),
        "one column": lambda call: depthwise_case(kernel=(3, 1), padding=(1, 0)),
        "a large kernel": lambda call: depthwise_case(kernel=(13, 5), padding=(6, 2)),
        "fp64": lambda call: depthwise_case(dtype=torch.float64),
        "NCHW": lambda call: replaced(call, 1, torch.Tensor.contiguous),
    },
    kernel=depthwise.KERNEL,
    patches=[(depthwise, "MIN_ELEMENTS", 1)],
)
