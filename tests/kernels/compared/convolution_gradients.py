"""Gradients of convolutions in bf16, computed by sums or in fp32, and which of them are left to torch's kernel."""

import functools
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from kernels.compared.convolutions import NHWC, SEEDS, STRIDES
from kernels.compared.oracle import Row, at_least, drawn, pairs
from nano_loop.kernels.convolution import convolution, depthwise, gradient_plans, weight_gradient
from nano_loop.patching.operators import gives_kernels, overridden
from nano_loop.patching.ownership import NO_RULES

#: Masks passed to torch's kernel: the gradients of input, weight and bias.
OF_INPUT, OF_WEIGHT, ALL = (True, False, False), (False, True, False), (True, True, True)


@contextmanager
def standing_in():
    """Replace torch's kernel by nano_loop's, and record which gradients are left to torch's."""
    left = []

    def noting(original):
        """Return a kernel that records its mask: whether the gradients of input, weight and bias are left to it."""

        def kernel(keys, *args):
            left.append(tuple(args[-1]))
            return original(keys, *args)

        return convolution.OVERRIDES[0]._replace(rules=lambda call: NO_RULES).make(kernel)

    with overridden("convolution_backward", noting, "CPU"):
        yield left


def inputs(images=3, channels=8, outputs=6, size=(9, 7), kernel=(3, 3), bias=True, transposed=False, groups=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    x = torch.randn(images, channels, *size, generator=generator).bfloat16()
    weight = torch.randn(*shape, *kernel, generator=generator).bfloat16()
    tensors = [x.contiguous(memory_format=NHWC) if x.dim() == 4 else x, weight]
    return [*tensors, torch.randn(outputs, generator=generator).bfloat16()] if bias else tensors


def gradients(function, tensors, dtype=torch.bfloat16, **kwargs):
    leaves = [each.to(dtype).requires_grad_() for each in tensors]
    out = function(*leaves, **kwargs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view(out.shape).to(torch.bfloat16)
    weight = torch.empty_like(out, dtype=torch.bfloat16).copy_(weight)
    return torch.autograd.grad(out, leaves, weight.to(dtype))


def call_of(left=(ALL,), function=F.conv2d, in_nchw=False, seed=0, geometry=None, **sizes):
    """Return a call of a function, and the masks of what is left to torch."""
    tensors = inputs(**sizes, seed=seed)
    return function, [tensors[0].contiguous(), *tensors[1:]] if in_nchw else tensors, geometry or {}, [*left]


def ours(call):
    function, tensors, geometry, expected = call
    with standing_in() as left:
        found = gradients(function, tensors, **geometry)
    assert left == expected
    return found


def by_torch(call, dtype=torch.bfloat16):
    function, tensors, geometry, _ = call
    return gradients(function, tensors, dtype, **geometry)


EVERY_SIZE = [(gradient_plans, "MIN_MULTIPLICATIONS", 1), (gradient_plans, "MIN_ELEMENTS", 1)]
row_of = functools.partial(
    Row,
    make=call_of,
    ours=ours,
    torchs=by_torch,
    exact=functools.partial(by_torch, dtype=torch.float64),
    bound=at_least(2),
    patches=EVERY_SIZE,
    kernel=SimpleNamespace(unavailable=None if gives_kernels() else "it needs torch 2.9", uses_amx=False),
)
TRANSPOSED = {"transposed": True, "left": [(True, True, False)]}
IN_2D = TRANSPOSED | {"function": F.conv_transpose2d}
OF_EACH = {"channels": 8, "outputs": 8, "groups": 8}
#: A transposed convolution's bias gradient is a sum. The weight's is torch's, also on CPUs with bf16 instructions.
OF_BIAS = row_of(
    patches=[*EVERY_SIZE, (weight_gradient, "FEWEST", 1 << 30)],
    sizes=drawn(
        images=(1, 5),
        channels=(2, 40),
        outputs=(2, 40),
        size=pairs(5, 14),
        kernel=pairs(1, 3),
        geometry=drawn(stride=STRIDES, dilation=pairs(1, 2)),
        seed=SEEDS,
        **{name: st.just(value) for name, value in IN_2D.items()},
    ),
    cases={
        "transposed, 1d": TRANSPOSED
        | {"function": F.conv_transpose1d, "size": (9,), "kernel": (2,), "geometry": {"stride": 2}},
        "transposed, 2d": IN_2D | {"kernel": (2, 2), "geometry": {"stride": 2}},
        "transposed, 2d, padded": IN_2D | {"geometry": {"stride": 2, "padding": 1, "output_padding": 1}},
        "transposed, 2d, groups": IN_2D | {"groups": 2, "geometry": {"groups": 2}},
        "transposed, 3d": TRANSPOSED
        | {"function": F.conv_transpose3d, "size": (3, 4, 5), "kernel": (2, 2, 2), "geometry": {"stride": 2}},
        "transposed, input in fp32": IN_2D
        | {"outputs": 3, "in_nchw": True, "left": [OF_INPUT, OF_WEIGHT], "geometry": {"stride": 2}},
        "depthwise, 3x3": OF_EACH | {"left": [ALL], "geometry": {"groups": 8}},
    },
)
#: Computed by C functions.
OF_DEPTHWISE = row_of(
    sizes=st.just({}),
    cases={
        f"stride {stride}": {"channels": 24, "outputs": 24, "groups": 24, "left": left}
        | {"geometry": {"groups": 24, "stride": stride, "padding": 1}}
        for stride, left in ((2, []), (1, [OF_INPUT]))
    },
    patches=[*EVERY_SIZE, (depthwise, "MIN_ELEMENTS", 1)],
)
IN_BOTH, LARGE_KERNEL = [OF_WEIGHT, OF_INPUT], OF_EACH | {"kernel": (5, 5)}
#: Computed by torch's kernel in fp32.
OF_GROUPS = row_of(
    sizes=st.just({}),
    cases={
        "depthwise, stride": OF_EACH
        | {"left": [OF_INPUT, (False, True, True)], "geometry": {"stride": 2, "groups": 8}},
        "depthwise, 5x5": LARGE_KERNEL | {"left": IN_BOTH, "geometry": {"padding": 2, "groups": 8}},
        "depthwise, 5x5, stride": LARGE_KERNEL
        | {"left": [(True, True, False)], "geometry": {"stride": 2, "padding": 2, "groups": 8}},
        "depthwise, several outputs": LARGE_KERNEL | {"outputs": 16, "left": IN_BOTH, "geometry": {"groups": 8}},
        "groups": {"groups": 2, "left": IN_BOTH, "geometry": {"padding": 1, "groups": 2}},
    },
    patches=[*EVERY_SIZE, (gradient_plans, "_ELEMENTS_OF_GROUPS", 1)],
)
