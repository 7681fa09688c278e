"""The kernel steps by name, and the thresholds below which they leave calls to torch."""

import pytest

from nano_loop.kernels import override
from nano_loop.kernels.linear import linear, product
from nano_loop.kernels.norm import norms
from nano_loop.patching.operators import gives_kernels
from nano_loop.steps import models
from nano_loop.steps.kernel_table import KERNEL_STEPS

BY_NAME = {kind.name: kind for kind in KERNEL_STEPS}
#: Makes sizes of any kind large enough, and the functions in C the default choice.
THRESHOLDS = {
    BY_NAME["fast_linear"]: [(linear, "MIN_MULTIPLICATIONS", 1), (models, "LARGE", 1)],
    BY_NAME["fast_norm"]: [(norms, "MIN_ELEMENTS", 1)],
}


def use_for_all_sizes(monkeypatch, kind):
    """Make a step compute tensors of any size, or skip the test if it cannot."""
    if kind.row.kernels.calls_torchs_kernels and not gives_kernels():
        pytest.skip("it needs torch 2.9")
    for kernel in (kind.row.kernels.kernel, *[product.KERNEL] * (kind.name == "fast_linear")):
        if kernel.unavailable is not None:
            pytest.skip(kernel.unavailable)
    for place, name, value in THRESHOLDS[kind]:
        monkeypatch.setattr(place, name, value)


def compute_in_c(patch):
    """Use functions in C for fp32 tensors of a run, whether or not they were measured to be faster."""
    choose = override.Override._is_chosen
    always = lambda self, algorithm, *call: algorithm.kernel is not None or choose(self, algorithm, *call)  # noqa: E731
    patch.setattr(override.Override, "_is_chosen", always)
