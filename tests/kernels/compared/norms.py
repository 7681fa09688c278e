"""Norms, with their statistics and gradients."""

import functools
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from kernels.compared.oracle import Row, assert_alike, drawn, in_fp64, plus, rms
from nano_loop.kernels.norm import norms, rms_norm

ATEN = torch.ops.aten
EPS, MOMENTUM = 1e-5, 0.1
#: Rounding error of a result in fp32, in case torch's happens to be exact.
ROUNDING = 2**-25
DTYPES = (torch.bfloat16, torch.float32)
KINDS = ("batch_norm", "group_norm", "layer_norm")
OURS = {name: (getattr(norms, name), getattr(norms, f"{name}_backward")) for name in KINDS}
THEIRS = {name: (getattr(ATEN, f"native_{name}"), getattr(ATEN, f"native_{name}_backward")) for name in KINDS}


class Case(NamedTuple):
    """A norm of an input, with the operators as arguments."""

    kind: str
    x: torch.Tensor
    gradient: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    groups: int = 1

    @property
    def weights(self):
        return self.x.size(-1 if self.kind == "layer_norm" else 1)

    def by(self, operators):
        """Return the output, the statistics, the updated running statistics, and the gradients."""
        forward, backward = operators[self.kind]
        sizes = {
            "batch_norm": (),
            "group_norm": (self.x.size(0), self.x.size(1), self.x[0, 0].numel(), self.groups),
            "layer_norm": (self.x.shape[-1:],),
        }[self.kind]
        x, gradient, weight, bias, mask = self.x, self.gradient, self.weight, self.bias, [True, *[True] * 2]
        if weight is None:
            mask[1:] = [False, False]
        if self.kind == "batch_norm":
            dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
            running = [torch.full((x.size(1),), each, dtype=dtype) for each in (0.5, 2.0)]
            found = forward(x, weight, bias, *running, True, MOMENTUM, EPS)
            backwards = backward(gradient, x, weight, *running, *found[1:], True, EPS, mask)
        elif self.kind == "group_norm":
            running, found = [], forward(x, weight, bias, *sizes, EPS)
            backwards = backward(gradient, x, *found[1:], weight, *sizes, mask)
        else:
            running, found = [], forward(x, *sizes, weight, bias, EPS)
            backwards = backward(gradient, x, *sizes, *found[1:], weight, bias, mask)
        return [*found, *running, *(each for each, wanted in zip(backwards, mask, strict=True) if wanted)]


def case_of(
    kind="batch_norm",
    shape=(4, 32, 16, 16),
    dtype=torch.bfloat16,
    nhwc=False,
    affine=True,
    groups=1,
    scale=1.0,
    offset=0.0,
    seed=0,
):
    generator = torch.Generator().manual_seed(seed)

    def made(*sizes):
        return torch.randn(sizes, generator=generator)

    x, gradient = ((made(*shape) * by + plus).to(dtype) for by, plus in ((scale, offset), (1.0, 0.1)))
    if nhwc:
        form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        x, gradient = x.contiguous(memory_format=form), gradient.contiguous(memory_format=form)
    width = shape[-1 if kind == "layer_norm" else 1]
    return Case(kind, x, gradient, *((made(width), made(width)) if affine else (None, None)), groups)


def bound(theirs, truth, case, place):
    # The magnitudes of the summands: a sum near zero has the same rounding error as another.
    of_x, of_sums = rms(case.x), rms(case.gradient) * (case.x.numel() / case.weights) ** 0.5
    scales = [0.0, of_x, 0.0, *[of_x**2] * 2 * (case.kind == "batch_norm"), 0.0, of_sums, of_sums]
    return 1.2 * theirs + ROUNDING * max(rms(truth), scales[place])


def of_images(given):
    """Return the arguments of `case_of`, from sizes of images."""
    sizes, channels, groups = given.pop("sizes"), given.pop("channels"), given["groups"]
    # without weights, torch's statistics are in bf16
    affine = given["affine"] or given["kind"] == "batch_norm" or given["dtype"] is torch.bfloat16
    shape = (given.pop("images"), channels, 13 if given["nhwc"] else 26, *sizes)
    return scaled(given) | {"shape": shape, "affine": affine, "groups": channels if groups == "each" else groups}


def scaled(given):
    return given | {"offset": given["offset"] * given["scale"]}


def made(far_away=False, **given):
    """Return a case; `far_away` makes the first elements, and so the means, large."""
    case = case_of(**given)
    if far_away:
        case.x[:, :, 0, 0] = 0
        case.x[:, :, :, 0] -= 500
    return case


def undefined(kind, value, dtype):
    def case():
        case = case_of(kind, (2, 32, 16, 32), dtype, nhwc=kind == "group_norm", groups=4)
        case.x[1, 3, 5, 7] = value
        return case

    return case


OF_NUMBERS = {"scale": [0.01, 1.0, 30.0], "offset": [0.0, 3.0], "affine": [False, True], "seed": (0, 99)}
OF_IMAGES = drawn(
    kind=[*KINDS[:2]],
    images=(1, 5),
    channels=[16, 24, 40, 64, 72, 100, 136],
    sizes=st.lists(st.integers(5, 14), min_size=1, max_size=2),
    **{"nhwc": [False, True], "dtype": [*DTYPES], "groups": [1, 4, "each"], **OF_NUMBERS},
).map(of_images)
SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(16, 300))
OF_ROWS = drawn(kind=["layer_norm"], shape=SHAPES, dtype=[*DTYPES], **OF_NUMBERS).map(scaled)
FAR_AWAY = {"far_away": True, "shape": (3, 32, 20, 30), "dtype": torch.float32, "offset": 1000.0}
IMAGES = Row(
    make=made,
    ours=lambda case: case.by(OURS),
    torchs=lambda case: case.by(THEIRS),
    bound=bound,
    also=assert_alike,
    sizes=OF_IMAGES,
    cases={
        **{
            f"{shape}, {dtype}": {"shape": shape, "dtype": dtype, "offset": 2.0}
            for shape in ((300, 64), (64, 1030), (40, 16, 200))
            for dtype in DTYPES
        },
        **{
            f"far away, {kind}, {nhwc}": FAR_AWAY | {"kind": kind, "nhwc": nhwc}
            for kind in KINDS[:2]
            for nhwc in (False, True)
        },
    },
    large=[
        {"kind": kind, "shape": (3, 48, 33, 40), "dtype": dtype, "nhwc": nhwc, "groups": 4}
        for kind in KINDS
        for nhwc in ((False,) if kind == "layer_norm" else (False, True))
        for dtype in DTYPES
    ],
    undefined={
        f"{value}, {kind}, {dtype}": undefined(kind, value, dtype)
        for kind in KINDS
        for value in (torch.nan, torch.inf)
        for dtype in DTYPES
    },
    kernel=norms.KERNEL,
)
ROWS = Row(
    make=case_of, ours=IMAGES.ours, torchs=IMAGES.torchs, bound=bound, also=assert_alike, sizes=OF_ROWS,
    kernel=norms.KERNEL,
)  # fmt: skip

# --- RMS norms ---


class RmsNorm(NamedTuple):
    """An RMS norm of rows."""

    x: torch.Tensor
    weight: torch.Tensor | None
    gradient: torch.Tensor
    shape: list[int]
    eps: float | None
    scale: float = 1.0


def rms_norm_of(
    shape=(70, 3, 100),
    dimensions=1,
    scale=1.0,
    offset=0.0,
    eps=None,
    affine=True,
    dtype=torch.float32,
    weights=torch.float32,
    seed=0,
):
    x, gradient, weight = (
        torch.randn(sizes, generator=torch.Generator().manual_seed(seed + number))
        for number, sizes in enumerate((shape, shape, shape[-dimensions:]))
    )
    x, gradient, weight = ((x + offset) * scale).to(dtype), gradient.to(dtype), weight.to(weights)
    return RmsNorm(x, weight if affine else None, gradient, [*shape[-dimensions:]], eps, scale)


def computed(norm):
    def compute(call):
        leaves = [leaf.detach().requires_grad_() for leaf in (call.x, call.weight) if leaf is not None]
        out = norm(leaves[0], call.shape, *leaves[1:], **{} if call.eps is None else {"eps": call.eps})
        assert out.dtype is call.x.dtype
        return [out.detach(), *torch.autograd.grad(out, leaves, call.gradient)]

    return compute


def by_torch(call):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        return computed(F.rms_norm)(call)


def exact(call):
    eps = torch.finfo(torch.float32).eps if call.eps is None else call.eps
    return computed(F.rms_norm)(in_fp64(call._replace(eps=eps)))


RMS = functools.partial(
    Row,
    make=rms_norm_of,
    ours=computed(rms_norm.rms_norm),
    torchs=by_torch,
    exact=exact,
    kernel=rms_norm.KERNEL,
)
OF_RMS = RMS(
    bound=lambda theirs, truth, call, place: 1.2 * theirs + 2**-24 * max(rms(truth), 1e-3 / call.scale),
    sizes=drawn(shape=SHAPES, dimensions=(1, 2), eps=[None, 1e-5], **OF_NUMBERS),
    large=[{}],
)
OF_RMS_IN_BF16 = RMS(
    bound=plus(1.1, 2**-12),
    also=assert_alike,
    sizes=drawn(
        shape=SHAPES,
        dimensions=(1, 2),
        eps=[None, 1e-5],
        dtype=[torch.bfloat16],
        weights=[*DTYPES],
        **OF_NUMBERS,
    ),
    large=[{"dtype": torch.bfloat16, "weights": weights} for weights in DTYPES],
)
