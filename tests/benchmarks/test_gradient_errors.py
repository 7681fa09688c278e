"""Gradients of rounded products are more exact than those of autocast by hand."""

import pytest

from benchmarks import gradient_errors
from nano_loop.kernels.linear import product
from nano_loop.patching.operators.operators import gives_kernels


@pytest.mark.skipif(
    product.KERNEL.unavailable is not None or not gives_kernels(), reason=f"{product.KERNEL.unavailable}, or torch 2.8"
)
@pytest.mark.parametrize("name", gradient_errors.MODELS)
def test_errors_are_at_most_four_fifths_of_autocast_s(name):
    by_hand, ours = gradient_errors.compared(name, seeds=3)
    assert 1e-4 < ours <= 0.8 * by_hand
