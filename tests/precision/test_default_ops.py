"""The table of autocast's operators matches this torch."""

import sys

import torch

from nano_loop import default_ops
from nano_loop.precision.autocast.default_ops import TORCHS


def test_table_has_each_operator_that_has_a_kernel_for_autocast():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    found = {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
    found = {name for name in found if has_kernel(f"aten::{name}", "AutocastCPU")}
    assert found >= set(TORCHS)
    if "intel_extension_for_pytorch" not in sys.modules:  # IPEX registers more
        assert found == set(TORCHS)


def test_lists_are_of_names_by_dtype():
    found = default_ops()
    assert {"linear", "scaled_dot_product_attention"} <= set(found.bf16)
    assert {"mse_loss", "cross_entropy_loss"} <= set(found.fp32)
    assert not set(found.bf16) & set(found.fp32)
    assert "cat" not in {*found.bf16, *found.fp32}
