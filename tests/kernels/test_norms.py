"""Norms in two passes keep layouts, handle equal elements, and leave unsupported calls to torch."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from steps.kernels.cases import compute_in_c
from torch import nn

from kernels.compared.norms import DTYPES, EPS, KINDS, MOMENTUM, OURS, case_of
from nano_loop import accelerated
from nano_loop.kernels.norm import norms, rms_norm
from nano_loop.patching.operators import gives_kernels

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def has_kernel():
    assert norms.KERNEL.unavailable is None


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


@EACH_DTYPE
def test_gradient_in_another_layout_is_laid_out_as_the_input(dtype):
    case = case_of("batch_norm", (3, 32, 12, 12), dtype, nhwc=True)
    in_nchw = case._replace(gradient=case.gradient.contiguous())
    assert all(map(torch.equal, case.by(OURS), in_nchw.by(OURS)))
    expanded = case._replace(gradient=case.gradient[:, :1, :1, :1].expand_as(case.x))
    written = case._replace(gradient=expanded.gradient.contiguous(memory_format=torch.channels_last))
    assert all(map(torch.equal, expanded.by(OURS), written.by(OURS)))


def test_input_of_an_rms_norm_in_bf16_can_be_written_to_before_the_backward():
    def gradient_of(norm):
        leaf = torch.linspace(-2, 3, 64 * 32).view(64, 32).bfloat16().requires_grad_()
        x = leaf * 2
        x += norm(x, [32])
        return torch.autograd.grad(x.square().sum(), leaf)[0]

    torch.testing.assert_close(gradient_of(rms_norm.rms_norm), gradient_of(F.rms_norm))


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


@pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")
@pytest.mark.parametrize("nhwc", [False, True])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(32), nn.GroupNorm(4, 32), nn.LayerNorm(16)], ids=KINDS)
def test_images_without_elements_are_torchs_or_empty(norm, nhwc, monkeypatch):
    monkeypatch.setattr(norms, "MIN_ELEMENTS", 0)  # so that nothing else rejects them
    compute_in_c(monkeypatch)
    form = torch.channels_last if nhwc else torch.contiguous_format
    x, results = torch.empty(0, 32, 16, 16).contiguous(memory_format=form).requires_grad_(), []
    for run in (contextlib.nullcontext(), accelerated(norm, fast_norm=True, tune_operators=False, verbose=False)):
        with run:
            out = norm(x)
            results.append([out, *torch.autograd.grad(out.sum(), [x, *norm.parameters()])])
    torch.testing.assert_close(*results, equal_nan=True)


def test_error_of_an_exchange_is_raised_and_what_c_does_not_take_has_none():
    x = torch.randn(4, 32, 16, 16)

    def interrupted(count, *sums):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        norms.batch_norm(x, None, None, None, None, True, 0.0, EPS, interrupted)
    assert norms.batch_norm(x.double(), None, None, None, None, True, 0.0, EPS, interrupted) is None
