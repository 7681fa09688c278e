"""Attention in blocks draws, masks and differentiates as torch's, or leaves calls to it; see also `test_exactness`."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.compared import attention as compared
from kernels.compared.attention import attention, inputs, results
from nano_loop.kernels.attention import attention as module
from nano_loop.kernels.attention import blocked_attention
from nano_loop.kernels.attention.attention import BLOCKS
from nano_loop.patching.operators import overridden, plainly

IN_BLOCKS = pytest.mark.skipif(
    blocked_attention.KERNEL.unavailable is not None, reason=str(blocked_attention.KERNEL.unavailable)
)


@pytest.fixture(autouse=True, params=[BLOCKS, *["blocks by AVX-512"] * blocked_attention.KERNEL.uses_amx])
def every_size_is_large(request, monkeypatch):
    """Compute in blocks at every size, if the CPU has the instructions."""
    if request.param == "blocks by AVX-512":
        monkeypatch.setattr(blocked_attention.KERNEL, "uses_amx", False)
    monkeypatch.setattr(module, "MIN_SCORES", 1)


VIEWS = {
    "heads of one projection": lambda x: x.view(2, 17, 3, 3, 16).permute(3, 0, 2, 1, 4).unbind(0),
    "keys of one head for all": lambda x: (
        x[0, :, :48].view(1, 17, 3, 16).transpose(1, 2).expand(2, 3, 17, 16),
        *[x[0, :, at : at + 16].expand(2, 3, 17, 16) for at in (48, 64)],
    ),
    "columns apart": lambda x: x.view(2, 3, 3, 16, 17).unbind(2),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_compute_what_their_copies_compute(view):
    base = torch.randn(2, 17, 144, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()

    def computed(change):
        tensors = [each.transpose(-1, -2) if each.size(-1) == 17 else each for each in view(base)]
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(*map(change, tensors))
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape).bfloat16()
        # For the views, because torch or IPEX may sum the gradients of views with shared memory in any order.
        return out, *torch.autograd.grad(out, tensors, weight)

    for mine, reference in zip(computed(lambda x: x), computed(torch.clone), strict=True):
        assert torch.equal(mine, reference)


@IN_BLOCKS
@pytest.mark.parametrize("number", [-1e9, torch.finfo(torch.bfloat16).min, 3e4, -3e4, 1e9])
@pytest.mark.parametrize("kwargs", [{}, {"dropout_p": 0.4}])
def test_rows_with_a_large_common_offset_have_the_gradients_of_the_definition(number, kwargs):
    tensors, mask = inputs(length=70), torch.zeros(70, 70).bfloat16()
    mask[3] = number
    mask[66, 5:] = number

    def by_definition(q, k, v):
        kept = 1.0
        if kwargs:
            kept = torch.empty(6, 70, 70).bernoulli_(0.6).view(2, 3, 70, 70) / 0.6
        return ((q @ k.mT / 4 + mask.float()).softmax(-1) * kept) @ v

    torch.manual_seed(0)
    exact = results(by_definition, tensors, torch.float32)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        ours = results(attention, tensors, attn_mask=mask, **kwargs)
    for found, reference in zip(ours, exact, strict=True):
        assert (found - reference).norm() < 0.01 * reference.norm()


def test_certain_dropout_gives_zeros():
    with torch.autocast("cpu", torch.bfloat16):
        assert all(each.eq(0).all() for each in results(attention, inputs(), dropout_p=1.0))


def test_scratch_above_the_bound_is_left_to_torch(called, monkeypatch):
    monkeypatch.setattr(blocked_attention, "SCRATCH_BOUND", 0)
    with torch.autocast("cpu", torch.bfloat16):
        attention(*inputs())
    assert not called


@pytest.mark.parametrize(
    ("tensors", "kwargs"),
    [
        ([inputs()[0], inputs(width=8)[1], inputs()[2]], {}),
        (inputs(), {"attn_mask": torch.ones(5, 5, dtype=torch.bool)}),
        (inputs(), {"attn_mask": torch.zeros(inputs()[1].size(-2))}),
    ],
)
def test_what_torch_refuses_is_refused(tensors, kwargs):
    for function in (F.scaled_dot_product_attention, attention):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises((RuntimeError, IndexError)):
            function(*tensors, **kwargs)


@pytest.fixture
def in_force(monkeypatch):
    """Replace torch's attention, and record for each call whether nano_loop computes it."""
    counted = []

    def counting(*args, **kwargs):
        call = module._supports(*args, **kwargs)
        counted.append(call is not None)
        return call

    monkeypatch.setattr(compared, "OVERRIDE", compared.OVERRIDE._replace(supports=counting))
    with overridden("scaled_dot_product_attention", plainly(attention), "AutocastCPU"):
        yield counted


def test_second_derivatives_work_where_the_user_asks_for_torchs_plain_kernel(in_force):
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*tensors)
    (gradient,) = torch.autograd.grad(out.float().sum(), tensors[0], create_graph=True)
    gradient.float().square().sum().backward()
    assert tensors[1].grad.isfinite().all()
    assert in_force == [False]


@IN_BLOCKS
def test_backward_keeps_the_inputs_and_a_number_for_each_row(in_force):
    saved = []
    tensors = inputs(batch=(2, 2), length=64)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.nbytes) or each, lambda each: each)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        F.scaled_dot_product_attention(*tensors)
    assert sum(saved) == 4 * (4 * 64) + sum(each.nbytes for each in tensors)
