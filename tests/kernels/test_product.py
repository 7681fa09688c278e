"""Products in blocks round fp32 factors as torch casts them, and accept batches and parts of larger matrices."""

import os
import subprocess
import sys

import pytest
import torch

from kernels.compared.oracle import rms
from kernels.compared.products import IN_BF16, LARGE
from nano_loop.kernels.linear import product as module

pytestmark = pytest.mark.skipif(module.KERNEL.unavailable is not None, reason=str(module.KERNEL.unavailable))


@pytest.fixture(autouse=True, params=["AVX-512", *["AMX"] * module.KERNEL.uses_amx])
def instructions(request, monkeypatch):
    """Compute products with these instructions."""
    monkeypatch.setattr(module.KERNEL, "uses_amx", request.param == "AMX")


factors = IN_BF16.make


def order(is_transposed):
    return "columns" if is_transposed else "rows"


@pytest.mark.parametrize("sizes", [(40, 50, 70), (33, 4500, 130)], ids=str)
@pytest.mark.parametrize("a_transposed", [False, True])
def test_result_in_fp32_is_not_rounded(sizes, a_transposed):
    a, b, bias = factors(*sizes, order(a_transposed))
    out = torch.full((sizes[0], 3 * sizes[2]), 7.0)
    found = module.product(a, b, bias, out=out[:, sizes[2] : 2 * sizes[2]])
    exact = a.double() @ b.double() + bias.double()
    assert rms(found.double() - exact) < 1e-5 * rms(exact)
    assert torch.equal(found.bfloat16(), module.product(a, b, bias))
    assert (out[:, : sizes[2]] == 7).all()
    assert (out[:, 2 * sizes[2] :] == 7).all()


@pytest.mark.parametrize("sizes", [(33, 35, 37), *LARGE], ids=str)
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_fp32_factors_are_rounded_as_torch_casts_them(threads, sizes, a_transposed, b_transposed):
    generator = torch.Generator().manual_seed(0)
    a = transposed_if(a_transposed, torch.randn(sizes[:2], generator=generator))
    b = transposed_if(b_transposed, torch.randn(sizes[1:], generator=generator))
    a[0, :4] = torch.tensor([torch.inf, torch.nan, 3.4e38, 1 + 2.0**-8])  # 3.4e38 becomes infinite; a tie
    bias = torch.randn(sizes[2], generator=generator)
    cast = [each.bfloat16() for each in (a, b)]
    for count in (1, 2, 7):
        threads(count)
        expected = module.product(*cast, bias, dtype=torch.float32)
        for mixed in ((a, b), (cast[0], b), (a, cast[1])):
            assert torch.equal(module.product(*mixed, bias, dtype=torch.float32).nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(module.product(a, b)[1:], module.product(*cast)[1:])


def transposed_if(is_transposed, made):
    """Return equal values, stored by columns if `is_transposed`."""
    return made.t().contiguous().t() if is_transposed else made


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_is_its_products(threads, batch, a_transposed, dtype):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(batch, *((67, 45) if a_transposed else (45, 67)), generator=generator).to(dtype)
    a = a.transpose(1, 2) if a_transposed else a
    b = torch.randn(67, 2 * batch, 50, generator=generator).to(dtype).transpose(0, 1)[::2]
    around = torch.zeros(batch, 60, 70)
    for count in (1, 2, 7):
        threads(count)
        for inputs in ((a, b), (a, b[:1].expand_as(b))):
            module.product(*inputs, out=around[:, 5:50, 10:60])
            expected = [module.product(*pair, dtype=torch.float32) for pair in zip(*inputs, strict=True)]
            assert torch.equal(around[:, 5:50, 10:60], torch.stack(expected))
    around[:, 5:50, 10:60] = 0
    assert not around.any()


@pytest.mark.parametrize("a_transposed", [False, True])
def test_parts_of_larger_matrices_are_read_where_they_lie_and_written_where_asked(a_transposed):
    a, b, bias = factors(50, 71, 90, order(a_transposed))
    around = torch.full((200, 200), torch.nan).bfloat16()
    a_in = (around.t() if a_transposed else around)[3:53, 5:76]
    b_in, out = torch.full_like(around, torch.nan)[7:78, 9:99], torch.zeros_like(around)
    a_in.copy_(a), b_in.copy_(b)
    found = module.product(a_in, b_in, bias, out[10:60, 20:110])
    assert found.data_ptr() == out[10:60, 20:110].data_ptr()
    assert torch.equal(out[10:60, 20:110], module.product(a, b, bias))
    out[10:60, 20:110] = 0
    assert not out.any()


def test_fewer_threads_than_asked_for_compute_all_parts():
    """OpenMP may return fewer threads. torch's bf16 products are then wrong, so these are compared in numpy."""
    code = (
        "import torch; from nano_loop.kernels.linear.product import product\n"
        "from nano_loop.kernels.convolution.weight_gradient import *\n"
        "torch.set_num_threads(8); a, b = torch.randn(500, 300).bfloat16(), torch.randn(300, 400).bfloat16()\n"
        "def numbers(x): return x.float().numpy()\n"
        "def check(found, exact): assert abs(numbers(found) - exact).max() < 0.01 * abs(exact).max()\n"
        "for x in (a, a.t().contiguous().t()): check(product(x, b), numbers(x) @ numbers(b))\n"
        "x, g = (torch.randn(8, 20, 20, 64).bfloat16().permute(0, 3, 1, 2) for _ in range(2))\n"
        "flat = [numbers(each.permute(1, 0, 2, 3).reshape(64, -1)) for each in (g, x)]\n"
        "check(weight_gradient(g, x, Geometry((1, 1), (1, 1), (0, 0), (1, 1)))[:, :, 0, 0], flat[0] @ flat[1].T)\n"
    )
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
