"""A norm with its activation in one pass is the norm, the sum and the activation one after another.

To the bit, but for SiLU: there is a rounding less, so errors are no larger.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_loop.errors import NanoError
from nano_loop.kernels.memory import empty
from nano_loop.kernels.norm import norms
from nano_loop.kernels.norm.norm_activation import (
    HARDSWISH,
    IDENTITY,
    SILU,
    Activation,
    Bypassed,
    Normalized,
    NormKind,
)
from nano_loop.kernels.norm.norm_arguments import layout_of, shape_of

EPS = 1e-5
NONE = float("nan")
#: Activations, and torch's functions.
TO_THE_BIT = {
    "ReLU": (Activation.relu(), torch.relu),
    "ReLU6": (Activation.relu(0.0, 0.5), lambda x: F.hardtanh(x, 0, 0.5)),
    "leaky": (Activation.relu(0.2), lambda x: F.leaky_relu(x, 0.2)),
    "hardswish": (HARDSWISH, F.hardswish),
}
ACTIVATIONS = {**TO_THE_BIT, "SiLU": (SILU, F.silu)}


@pytest.fixture(autouse=True)
def has_kernel():
    assert norms.KERNEL.unavailable is None


def tensor(*sizes, generator, dtype, nhwc):
    form = torch.channels_last if nhwc else torch.contiguous_format
    return torch.randn(sizes, generator=generator).to(dtype).contiguous(memory_format=form)


def normalized(sizes, dtype=torch.float32, nhwc=True, has_sum=True, affine=True, groups=0, seed=0):
    """Return a norm that is not written, its output by the norm alone, and the gradient of an activation's output."""
    generator = torch.Generator().manual_seed(seed)
    x, added, gradient = (tensor(*sizes, generator=generator, dtype=dtype, nhwc=nhwc) for _ in range(3))
    weight, bias = (torch.randn(sizes[1], generator=generator) if affine else None for _ in range(2))
    kind = NormKind(norms.KERNEL, shape_of(x, layout_of(x), together=not groups), groups, EPS)
    if groups:
        layout = layout_of(x)
        results = norms.group_norm(x, weight, bias, layout.images, layout.channels, layout.pixels, groups, EPS)
    else:
        running = [torch.zeros(sizes[1]), torch.ones(sizes[1])]  # so that the statistics are in fp32
        results = norms.batch_norm(x, weight, bias, *running, True, 0.1, EPS)
    out, *statistics = results
    return Normalized(kind, x, weight, bias, *statistics, added if has_sum else None), out, gradient


def one_by_one(norm, out, gradient, name="ReLU"):
    """Return output and gradients by a norm, a sum and an activation, each with its own pass."""
    total = (out if norm.added is None else out + norm.added).requires_grad_()
    result = ACTIVATIONS[name][1](total)
    (of_sum,) = torch.autograd.grad(result, total, gradient)
    x, groups, weight, statistics = norm.x, norm.kind.groups, norm.weight, (norm.means, norm.inverses)
    if groups:
        sizes = x.size(0), x.size(1), x[0, 0].numel(), groups
        of_norm = norms.group_norm_backward(of_sum, x, *statistics, weight, *sizes, [True] * 3)
    else:
        of_norm = norms.batch_norm_backward(of_sum, x, weight, None, None, *statistics, True, EPS, [True] * 3)
    return [result.detach(), *of_norm, *([] if norm.added is None else [of_sum])]


def together(norm, gradient, name="ReLU"):
    """Return the same in the passes of the norm."""
    result, activation = torch.empty_like(norm.x), ACTIVATIONS[name][0]
    norm.write(result, activation)
    of_sum = None if norm.added is None else torch.empty_like(norm.x)
    of_norm = [torch.empty_like(norm.x), *(empty(norm.x.size(1)) for _ in range(2))]
    kernel, shape, groups, _ = norm.kind
    parameters = (norm.weight, norm.means, norm.inverses, norm.bias, None if of_sum is None else result)
    given = shape, groups, activation, gradient, norm.x, *parameters
    assert kernel("norm_activation_backward", *given, of_sum, *of_norm)
    return [result, *of_norm, *([] if of_sum is None else [of_sum])]


def in_fp64(norm, gradient, name):
    """Return the same by torch in fp64."""
    inputs = [None if each is None else each.double().requires_grad_() for each in (norm.x, norm.weight, norm.bias)]
    result = ACTIVATIONS[name][1](norm.kind.computed_again(*inputs))
    return [result.detach(), *torch.autograd.grad(result, [each for each in inputs if each is not None], gradient)]


@settings(max_examples=80, deadline=None)
@given(
    images=st.integers(1, 5),
    channels=st.sampled_from([16, 24, 40, 64, 72, 100, 136]),
    height=st.integers(5, 14),
    nhwc=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_sum=st.booleans(),
    affine=st.booleans(),
    groups=st.sampled_from([0, 1, 4, 8]),
    name=st.sampled_from([*TO_THE_BIT]),
    seed=st.integers(0, 99),
)
def test_results_are_those_of_separate_passes(
    images, channels, height, nhwc, dtype, has_sum, affine, groups, name, seed
):
    affine = affine or bool(groups)  # or torch's statistics of groups are in bf16
    sizes = images, channels * (1 if channels % 8 == 0 else 2), height, 26
    has_sum = has_sum and ACTIVATIONS[name][0].is_relu
    norm, out, gradient = normalized(sizes, dtype, nhwc, has_sum, affine, groups, seed)
    results = together(norm, gradient, name), one_by_one(norm, out, gradient, name)
    for mine, other in zip(*results, strict=True):
        assert (mine.dtype, mine.stride()) == (other.dtype, other.stride())
        assert torch.equal(mine, other)


@settings(max_examples=80, deadline=None)
@given(
    images=st.integers(1, 5),
    channels=st.sampled_from([16, 24, 40, 64, 72, 136]),
    height=st.integers(5, 14),
    nhwc=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    groups=st.sampled_from([0, 1, 4, 8]),
    seed=st.integers(0, 99),
)
def test_errors_of_silu_are_not_larger_than_those_of_separate_passes(
    images, channels, height, nhwc, dtype, groups, seed
):
    norm, out, gradient = normalized((images, channels, height, 26), dtype, nhwc, False, True, groups, seed)
    results = [compute(norm, gradient, "SiLU") for compute in (together, in_fp64)]
    results.insert(1, one_by_one(norm, out, gradient, "SiLU"))
    for mine, other, exact in zip(*results, strict=True):
        assert (mine.dtype, mine.stride()) == (other.dtype, other.stride())
        error, of_other = ((each.double() - exact).square().mean().sqrt() for each in (mine, other))
        assert error <= 1.1 * of_other + 1e-6 * exact.square().mean().sqrt()


@pytest.mark.parametrize(("has_sum", "name"), [(False, "ReLU"), (True, "ReLU"), (False, "SiLU")])
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("nhwc", [False, True])
def test_results_do_not_depend_on_the_number_of_threads(for_each_number, has_sum, name, groups, nhwc):
    norm, _, gradient = normalized((3, 48, 33, 40), torch.bfloat16, nhwc, has_sum, groups=groups)
    first, *others = for_each_number(lambda: together(norm, gradient, name), 1, 2, 3)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("name", "has_sum"), [("ReLU", False), ("ReLU", True), ("SiLU", False), ("hardswish", False)])
@pytest.mark.parametrize(("nhwc", "groups"), [*itertools.product([False, True], [0, 4])])
def test_what_is_no_number_is_where_separate_passes_have_it(value, name, has_sum, nhwc, groups):
    norm, _, gradient = normalized((2, 32, 16, 32), torch.float32, nhwc, has_sum, groups=groups)
    norm.x[1, 3, 5, 7] = value
    if has_sum:
        norm.added[0, 5, 1, 1] = value
    separate = one_by_one(norm, by_hand(norm), gradient, name)
    for mine, other in zip(together(norm, gradient, name), separate, strict=True):
        assert torch.equal(mine.isnan(), other.isnan())
        assert torch.equal(mine.isinf(), other.isinf())


def by_hand(norm):
    """Return the norm's output from its statistics."""
    out = torch.empty_like(norm.x)
    norm._replace(added=None).write(out)
    return out


def test_what_lies_in_another_order_is_added_by_torch():
    norm, *_ = normalized((2, 32, 16, 20), nhwc=True)
    apart = norm._replace(added=norm.added.contiguous(memory_format=torch.contiguous_format))
    for relu in (IDENTITY, *(relu for relu, _ in TO_THE_BIT.values() if relu.is_relu)):
        found, expected = torch.empty_like(norm.x), torch.empty_like(norm.x)
        apart.write(found, relu)
        norm.write(expected, relu)
        assert torch.equal(found, expected)


def test_changes_in_place_are_refused():
    norm, *_ = normalized((2, 32, 16, 20))
    versions = norm.versions()
    norm.refuse_changes(versions)
    norm.added.mul_(2)
    with pytest.raises(NanoError, match="pass fast_norm=False"):
        norm.refuse_changes(versions)


def test_outputs_that_are_freed_have_no_gradients_unless_they_were_used():
    bypassed, output = Bypassed(), torch.ones(1)
    bypassed.add(output)
    assert bypassed.have_gradients()
    del output
    assert not bypassed.have_gradients()
    bypassed.is_used = True
    assert bypassed.have_gradients()
