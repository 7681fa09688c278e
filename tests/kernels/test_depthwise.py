"""Gradients of depthwise convolutions by C functions are as exact as torch's, which computes the others."""

import ctypes
import platform

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_loop.cpu import read_machine
from nano_loop.kernels import compiler
from nano_loop.kernels.convolution import depthwise
from nano_loop.kernels.convolution.weight_gradient import Geometry

NHWC = torch.channels_last


@pytest.fixture(autouse=True)
def has_kernel():
    assert depthwise.KERNEL.unavailable is None


@pytest.fixture(autouse=True)
def every_size_is_worth_it(monkeypatch):
    monkeypatch.setattr(depthwise, "MIN_ELEMENTS", 1)


def case(images=2, channels=24, sizes=(9, 12), kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), **more):
    """Return the gradient of the output, the inputs, the weight and the geometry."""
    generator = torch.Generator().manual_seed(more.get("seed", 0))
    dtype = more.get("dtype", torch.float32)
    x = torch.randn(images, channels, *sizes, generator=generator).to(dtype).contiguous(memory_format=NHWC)
    weight = torch.randn(channels, 1, *kernel, generator=generator).to(dtype)
    shape = F.conv2d(x, weight, None, stride, padding, dilation, channels).shape
    gradient = torch.randn(shape, generator=generator).to(dtype).contiguous(memory_format=NHWC)
    return gradient, x, weight, Geometry(kernel, stride, padding, dilation)


def by_torch(gradient, x, weight, geometry):
    pairs = (geometry.stride, geometry.padding, geometry.dilation)
    arguments = (None, *map(list, pairs), False, [0, 0], x.size(1), [True, True, False])
    return torch.ops.aten.convolution_backward(gradient, x, weight, *arguments)[:2]


def by_functions(gradient, x, weight, geometry):
    return depthwise.input_gradient(gradient, x, weight, geometry), depthwise.weight_gradient(gradient, x, geometry)


def distance(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def pairs_of(*numbers):
    return st.tuples(*[st.sampled_from(numbers)] * 2)


@settings(max_examples=80, deadline=None)
@given(
    images=st.sampled_from([1, 2, 5, 17]),
    channels=st.sampled_from([16, 24, 40, 72, 100, 160]),
    sizes=pairs_of(7, 9, 12, 15),
    kernel=st.tuples(st.sampled_from([1, 2, 3, 5, 7]), st.sampled_from([3, 5, 7])),
    stride=pairs_of(1, 2, 3),
    padding=pairs_of(0, 1, 2, 3),
    dilation=pairs_of(1, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_gradients_are_as_exact_as_torch_s(images, channels, sizes, kernel, stride, padding, dilation, dtype, seed):
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding = [max(p, (r - size + 1) // 2) for p, r, size in zip(padding, reach, sizes, strict=True)]
    tensors = case(images, channels, sizes, kernel, stride, tuple(padding), dilation, dtype=dtype, seed=seed)
    assert depthwise.supports(*tensors, channels)
    exact = by_torch(*(tensor.double() for tensor in tensors[:3]), tensors[3])
    of_x, of_weight = by_functions(*tensors)
    assert (of_x.dtype, of_x.stride()) == (dtype, tensors[1].stride())
    assert (of_weight.dtype, of_weight.shape) == (torch.float32, tensors[2].shape)
    assert distance(of_x, exact[0]) < (3e-3 if dtype is torch.bfloat16 else 1e-6)
    assert distance(of_weight, exact[1]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_do_not_depend_on_the_number_of_threads(for_each_number, dtype):
    tensors = case(images=3, channels=40, sizes=(33, 20), dtype=dtype)
    first, *others = for_each_number(lambda: by_functions(*tensors), 1, 2, 3)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64")
def test_results_are_near_each_other_at_every_level_of_instructions(monkeypatch, tmp_path):
    results = []
    for level in compiler.LEVELS:
        if level.instruction_sets <= read_machine().instruction_sets:
            compiler.compile_library("depthwise", level, tmp_path / level.name)
            library = ctypes.CDLL(str(tmp_path / level.name))
            monkeypatch.setattr(depthwise.KERNEL, "_library", lambda library=library: library)
            results.append(by_functions(*case(channels=40, kernel=(5, 5), padding=(2, 2), stride=(2, 1))))
    for mine, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_nothing_is_written_beside_the_results(behind_memory):
    by_functions(*case(channels=40, dtype=torch.bfloat16))
    assert behind_memory
    assert all((each == 7).all() for each in behind_memory)


@pytest.mark.parametrize(
    "change",
    [
        {"channels": 8},
        {"kernel": (3, 1), "padding": (1, 0)},
        {"kernel": (13, 5), "padding": (6, 2)},
        {"dtype": torch.float64},
        {"in_nchw": True},
        {"groups": 12},
        {"fewest": 1 << 20},
    ],
)
def test_others_are_left_to_torch(monkeypatch, change):
    groups, fewest = change.pop("groups", None), change.pop("fewest", 1)
    monkeypatch.setattr(depthwise, "MIN_ELEMENTS", fewest)
    in_nchw = change.pop("in_nchw", False)
    gradient, x, weight, geometry = case(**change)
    x = x.contiguous() if in_nchw else x
    assert not depthwise.supports(gradient, x, weight, geometry, groups or x.size(1))
