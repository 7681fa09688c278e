"""Gradients of rounded products are more accurate than those of autocast by hand."""

import pytest

from benchmarks import gradient_errors
from nano_loop.kernels.linear import product
from nano_loop.patching.operators import gives_kernels

pytestmark = pytest.mark.skipif(
    product.KERNEL.unavailable is not None or not gives_kernels(), reason=f"{product.KERNEL.unavailable}, or torch 2.8"
)


@pytest.mark.parametrize("name", gradient_errors.MODELS)
def test_errors_are_at_most_four_fifths_of_autocast_s(name):
    rms = gradient_errors.compared(name, seeds=3)
    by_hand = rms[gradient_errors.AUTOCAST]
    assert 1e-4 < rms[gradient_errors.PRODUCTS] <= 0.8 * by_hand
    assert 1e-4 < rms[gradient_errors.BF16] <= 1.05 * by_hand  # 1.00 over 25 seeds


@pytest.mark.slow
@pytest.mark.parametrize("name", gradient_errors.SHARES)
def test_most_multiplications_of_large_models_are_in_bf16(name):
    assert 0.95 <= gradient_errors.share_in_bf16(name) < 1.01
