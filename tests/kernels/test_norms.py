"""Norms in two passes are as exact as torch's, whatever the shape, and leave to torch what they do not compute."""

import ctypes
import itertools
import platform
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_loop.cpu import read_machine
from nano_loop.kernels import compiler
from nano_loop.kernels.norm import norms

ATEN = torch.ops.aten
EPS, MOMENTUM = 1e-5, 0.1
#: Rounding of a result to fp32, of which torch's may have none by luck.
ROUNDING = 2**-25
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
KINDS = ("batch_norm", "group_norm", "layer_norm")
OURS = {name: (getattr(norms, name), getattr(norms, f"{name}_backward")) for name in KINDS}
THEIRS = {name: (getattr(ATEN, f"native_{name}"), getattr(ATEN, f"native_{name}_backward")) for name in KINDS}


@pytest.fixture(autouse=True)
def has_kernel():
    assert norms.KERNEL.unavailable is None


@dataclass
class Case:
    """A norm of some input, by operators that are given."""

    kind: str
    x: torch.Tensor
    gradient: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    groups: int = 1

    @property
    def weights(self):
        return self.x.size(-1 if self.kind == "layer_norm" else 1)

    def in_fp64(self):
        cast = [None if each is None else each.double() for each in (self.x, self.gradient, self.weight, self.bias)]
        return Case(self.kind, *cast, self.groups)

    def by(self, operators):
        """Return the output, the statistics, what became of running ones, and the gradients."""
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


def case_of(kind, shape, dtype=torch.bfloat16, nhwc=False, affine=True, groups=1, scale=1.0, offset=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def made(*sizes):
        return torch.randn(sizes, generator=generator)

    x, gradient = ((made(*shape) * by + plus).to(dtype) for by, plus in ((scale, offset), (1.0, 0.1)))
    if nhwc:
        form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        x, gradient = x.contiguous(memory_format=form), gradient.contiguous(memory_format=form)
    width = shape[-1 if kind == "layer_norm" else 1]
    return Case(kind, x, gradient, *((made(width), made(width)) if affine else (None, None)), groups)


def rms(tensor):
    return tensor.double().square().mean().sqrt().item()


def bounded(case):
    """Yield results, those of torch, those in fp64, and the largest root mean square by which the first may be off."""
    ours, theirs, exact = case.by(OURS), case.by(THEIRS), case.in_fp64().by(THEIRS)
    # What is summed, of whose rounding a sum near zero has as much as another.
    of_x, of_sums = rms(case.x), rms(case.gradient) * (case.x.numel() / case.weights) ** 0.5
    scales = [0.0, of_x, 0.0, *[of_x**2] * 2 * (case.kind == "batch_norm"), 0.0, of_sums, of_sums]
    for mine, other, truth, scale in zip(ours, theirs, exact, scales, strict=False):
        yield mine, other, truth, 1.2 * rms(other - truth) + ROUNDING * max(rms(truth), scale)


def check(case):
    for mine, other, truth, bound in bounded(case):
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
        assert rms(mine - truth) <= bound


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["batch_norm", "group_norm"]),
    images=st.integers(1, 5),
    channels=st.sampled_from([16, 24, 40, 64, 72, 100, 136]),
    sizes=st.lists(st.integers(5, 14), min_size=1, max_size=2),
    nhwc=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    groups=st.sampled_from([1, 4, "each"]),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    offset=st.sampled_from([0.0, 3.0]),
    affine=st.booleans(),
    seed=st.integers(0, 99),
)
def test_norms_of_images_are_as_exact_as_torch_s(
    kind, images, channels, sizes, nhwc, dtype, groups, scale, offset, affine, seed
):
    affine |= kind == "batch_norm" or dtype is torch.bfloat16  # without, torch's statistics are in bf16
    shape = (images, channels, 13 if nhwc else 26, *sizes)
    groups = channels if groups == "each" else groups
    check(case_of(kind, shape, dtype, nhwc, affine, groups, scale, offset * scale, seed))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40), st.integers(16, 300)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    offset=st.sampled_from([0.0, 3.0]),
    affine=st.booleans(),
    seed=st.integers(0, 99),
)
def test_layer_norms_are_as_exact_as_torch_s(shape, dtype, scale, offset, affine, seed):
    check(case_of("layer_norm", shape, dtype, False, affine, 1, scale, offset * scale, seed))


@pytest.mark.parametrize("shape", [(300, 64), (64, 1030), (40, 16, 200)])
def test_batch_norms_of_rows_and_of_sequences_are_as_exact_as_torch_s(shape):
    check(case_of("batch_norm", shape, torch.bfloat16, offset=2.0))
    check(case_of("batch_norm", shape, torch.float32, offset=2.0))


@pytest.mark.parametrize("kind", ["batch_norm", "group_norm"])
@pytest.mark.parametrize("nhwc", [False, True])
def test_large_means_and_first_elements_that_are_far_away_cost_no_digits(kind, nhwc):
    case = case_of(kind, (3, 32, 20, 30), torch.float32, nhwc, offset=1000.0)
    case.x[:, :, 0, 0] = 0
    case.x[:, :, :, 0] -= 500
    check(case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nhwc", [False, True])
@DTYPES
def test_results_do_not_depend_on_the_number_of_threads(for_each_number, kind, nhwc, dtype):
    case = case_of(kind, (3, 48, 33, 40), dtype, nhwc and kind != "layer_norm", groups=4)
    first, *others = for_each_number(lambda: case.by(OURS), 1, 2, 3)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
def test_results_are_the_same_at_every_level_of_instructions(monkeypatch, tmp_path):
    """Those of layer norms depend on whether the compiler fuses products with weights and sums with biases."""
    cases = [
        case_of(kind, (3, 48, 13, 41), dtype, nhwc, groups=4)
        for kind, dtype, nhwc in itertools.product(KINDS[:2], (torch.bfloat16, torch.float32), (False, True))
    ]
    for case in cases:
        case.x[0, 0, 0, 0] = torch.nan
    results = []
    for level in compiler.LEVELS:
        if level.instruction_sets <= read_machine().instruction_sets:
            compiler.compile_library("norms", level, tmp_path / level.name)
            library = ctypes.CDLL(str(tmp_path / level.name))
            monkeypatch.setattr(norms.KERNEL, "_library", lambda library=library: library)
            results.append([tensor for case in cases for tensor in case.by(OURS)])
    for mine, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@DTYPES
def test_what_is_no_number_stays_none(kind, value, dtype):
    case = case_of(kind, (2, 32, 16, 32), dtype, nhwc=kind == "group_norm", groups=4)
    case.x[1, 3, 5, 7] = value
    for mine, other in zip(case.by(OURS), case.by(THEIRS), strict=True):
        assert torch.equal(mine.isfinite(), other.isfinite())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nhwc", [False, True])
@pytest.mark.parametrize("value", [0.0, 3.0, 1e6 + 0.0625, -3e6, 1e20])
@pytest.mark.parametrize(("shape", "groups"), [((2, 32, 16, 32), 4), ((3, 33, 4, 191), 3)])
def test_equal_elements_have_no_variance(kind, nhwc, value, shape, groups):
    case = case_of(kind, shape, torch.float32, nhwc and kind != "layer_norm", groups=groups)
    case.x.fill_(value)
    out, means, inverses, *others = case.by(OURS)
    assert torch.equal(means, torch.full_like(means, value))
    torch.testing.assert_close(inverses, torch.full_like(inverses, EPS**-0.5))
    assert all(each.isfinite().all() for each in (out, *others))


@DTYPES
def test_gradient_in_another_layout_is_laid_out_as_the_input(dtype):
    case = case_of("batch_norm", (3, 32, 12, 12), dtype, nhwc=True)
    found = case.by(OURS)
    case.gradient = case.gradient.contiguous()
    assert all(map(torch.equal, found, case.by(OURS)))
    case.gradient = case.gradient[:, :1, :1, :1].expand_as(case.x)
    found = case.by(OURS)
    case.gradient = case.gradient.contiguous(memory_format=torch.channels_last)
    assert all(map(torch.equal, found, case.by(OURS)))


@DTYPES
def test_only_gradients_that_are_asked_for_are_computed(dtype):
    case = case_of("layer_norm", (4, 64), dtype)
    _, means, inverses = norms.layer_norm(case.x, (64,), case.weight, case.bias, EPS)
    given = case.gradient, case.x, (64,), means, inverses, case.weight, case.bias
    whole = norms.layer_norm_backward(*given, [True] * 3)
    for place in range(3):
        found = norms.layer_norm_backward(*given, [number == place for number in range(3)])
        assert [each is not None for each in found] == [number == place for number in range(3)]
        assert torch.equal(found[place], whole[place])


def normalized(x, weight=None, training=True):
    return norms.batch_norm(x, weight, None, None, None, training, MOMENTUM, EPS)


def test_torch_computes_the_rest():
    x, ones = case_of("batch_norm", (4, 32, 16, 16), nhwc=True).x, torch.ones(32)
    assert normalized(x, ones) is not None
    assert normalized(x, ones, training=False) is None
    assert normalized(x) is None  # statistics would be in bf16
    assert normalized(x, ones.bfloat16()) is None
    assert normalized(x.double(), ones.double()) is None
    assert normalized(x[:, :, ::2], ones) is None
    assert normalized(x[:, :8].contiguous(memory_format=torch.channels_last), ones[:8]) is None
    assert normalized(x[:, :, :4, :4].contiguous(), ones) is None
    assert norms.layer_norm(torch.randn(64, 8), (8,), None, None, EPS) is None
    assert norms.layer_norm(torch.randn(4, 16), (16,), torch.ones(16).double(), None, EPS) is None
    for groups in (0, 5):
        assert norms.group_norm(x, ones, ones, 4, 32, 256, groups, EPS) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nhwc", [False, True])
def test_tensors_without_elements_are_torchs_or_empty(kind, nhwc):
    case = case_of(kind, (0, 32, 16, 16), torch.float32, nhwc)
    forward, backward = OURS[kind]
    if kind == "layer_norm":
        out, *statistics = forward(case.x, (16,), case.weight, case.bias, EPS)
        assert out.shape == case.x.shape
        assert backward(case.gradient, case.x, (16,), *statistics, case.weight, case.bias, [True] * 3) is None
        return
    ones = torch.ones(32)
    if kind == "batch_norm":
        assert forward(case.x, ones, ones, None, None, True, MOMENTUM, EPS) is None
        assert backward(case.gradient, case.x, ones, None, None, ones, ones, True, EPS, [True] * 3) is None
    else:
        statistics = [torch.ones(0, 4)] * 2
        assert forward(case.x, ones, ones, 0, 32, 256, 4, EPS) is None
        assert backward(case.gradient, case.x, *statistics, ones, 0, 32, 256, 4, [True] * 3) is None
