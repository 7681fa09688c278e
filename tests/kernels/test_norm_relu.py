"""A batch norm with its ReLU in one pass is, to the bit, the norm, the sum and the ReLU one after another."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_loop.errors import NanoError
from nano_loop.kernels.memory import empty
from nano_loop.kernels.norm import norms
from nano_loop.kernels.norm.norm_arguments import layout_of, shape_of
from nano_loop.kernels.norm.norm_relu import IDENTITY, Bypassed, Normalized, Relu

EPS = 1e-5
NONE = float("nan")
#: ReLU and its like: the arguments of `Relu`, and torch's function.
RELUS = {
    "ReLU": ((0.0, NONE), torch.relu),
    "ReLU6": ((0.0, 0.5), lambda x: F.hardtanh(x, 0, 0.5)),
    "leaky": ((0.2, NONE), lambda x: F.leaky_relu(x, 0.2)),
}


@pytest.fixture(autouse=True)
def has_kernel():
    assert norms.KERNEL.unavailable is None


def tensor(*sizes, generator, dtype, nhwc):
    form = torch.channels_last if nhwc else torch.contiguous_format
    return torch.randn(sizes, generator=generator).to(dtype).contiguous(memory_format=form)


def normalized(sizes, dtype=torch.float32, nhwc=True, has_sum=True, affine=True, seed=0):
    """Return a batch norm that is not written, its output by the norm alone, and the gradient of a ReLU's output."""
    generator = torch.Generator().manual_seed(seed)
    x, added, gradient = (tensor(*sizes, generator=generator, dtype=dtype, nhwc=nhwc) for _ in range(3))
    weight, bias = (torch.randn(sizes[1], generator=generator) if affine else None for _ in range(2))
    running = [torch.zeros(sizes[1]), torch.ones(sizes[1])]  # so that the statistics are in fp32
    out, means, inverses = norms.batch_norm(x, weight, bias, *running, True, 0.1, EPS)
    shape = shape_of(x, layout_of(x), together=True)
    return Normalized(norms.KERNEL, shape, x, weight, bias, means, inverses, added if has_sum else None), out, gradient


def one_by_one(norm, out, gradient, relu="ReLU"):
    """Return output and gradients by a norm, a sum and a ReLU, each with its own pass."""
    total = (out if norm.added is None else out + norm.added).requires_grad_()
    result = RELUS[relu][1](total)
    (of_sum,) = torch.autograd.grad(result, total, gradient)
    of_norm = norms.batch_norm_backward(
        of_sum, norm.x, norm.weight, None, None, norm.means, norm.inverses, True, EPS, [True] * 3
    )
    return [result.detach(), *of_norm, *([] if norm.added is None else [of_sum])]


def together(norm, gradient, relu="ReLU"):
    """Return the same in the passes of the norm."""
    result = torch.empty_like(norm.x)
    relu = Relu(*RELUS[relu][0])
    norm.write(result, relu)
    of_sum = None if norm.added is None else torch.empty_like(norm.x)
    of_norm = [torch.empty_like(norm.x), *(empty(norm.x.size(1)) for _ in range(2))]
    parameters = (norm.weight, norm.means, norm.inverses, norm.bias, None if of_sum is None else result)
    assert norm.kernel("batch_norm_relu_backward", norm.shape, relu, gradient, norm.x, *parameters, of_sum, *of_norm)
    return [result, *of_norm, *([] if of_sum is None else [of_sum])]


@settings(max_examples=80, deadline=None)
@given(
    images=st.integers(1, 5),
    channels=st.sampled_from([16, 24, 40, 64, 72, 100, 136]),
    height=st.integers(5, 14),
    nhwc=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_sum=st.booleans(),
    affine=st.booleans(),
    relu=st.sampled_from([*RELUS]),
    seed=st.integers(0, 99),
)
def test_results_are_those_of_separate_passes(images, channels, height, nhwc, dtype, has_sum, affine, relu, seed):
    norm, out, gradient = normalized((images, channels, height, 26), dtype, nhwc, has_sum, affine, seed)
    results = together(norm, gradient, relu), one_by_one(norm, out, gradient, relu)
    for mine, other in zip(*results, strict=True):
        assert (mine.dtype, mine.stride()) == (other.dtype, other.stride())
        assert torch.equal(mine, other)


@pytest.mark.parametrize("has_sum", [False, True])
@pytest.mark.parametrize("nhwc", [False, True])
def test_results_do_not_depend_on_the_number_of_threads(for_each_number, has_sum, nhwc):
    norm, _, gradient = normalized((3, 48, 33, 40), torch.bfloat16, nhwc, has_sum)
    first, *others = for_each_number(lambda: together(norm, gradient), 1, 2, 3)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("has_sum", "nhwc"), [*itertools.product([False, True], repeat=2)])
def test_what_is_no_number_is_where_separate_passes_have_it(value, has_sum, nhwc):
    norm, _, gradient = normalized((2, 32, 16, 32), torch.float32, nhwc, has_sum)
    norm.x[1, 3, 5, 7] = value
    if has_sum:
        norm.added[0, 5, 1, 1] = value
    for mine, other in zip(together(norm, gradient), one_by_one(norm, by_hand(norm), gradient), strict=True):
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
    for relu in (IDENTITY, *(Relu(*arguments) for arguments, _ in RELUS.values())):
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
