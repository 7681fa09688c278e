"""Loops train with a step's kernels as with torch's; code outside the run is bitwise equal to torch's."""

import pytest
import torch
from torch import nn

from nano_loop import TorchNano, accelerated
from nano_loop.kernels import override
from nano_loop.patching.deterministic_mode import may_depend_on_times
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.patch_table import users
from nano_loop.steps import products
from nano_loop.steps.kernel_step import LOOKS_FROM
from steps.kernels.cases import (
    ACTIVATIONS,
    BATCH,
    BY_NAME,
    IN_FP32,
    LINEARS,
    LOSSES,
    LSTMS,
    NORMS,
    assert_near,
    trained,
    use_for_all_sizes,
)

CASES = ACTIVATIONS | NORMS | LINEARS | LSTMS | LOSSES
VARIANTS = [(name, options) for name, case in CASES.items() for options in case.variants]
#: The functions that compute fp32 tensors in a step; none if torch is as fast.
TAKING_FP32 = [
    ("batch norm", "NCHW", [*BATCH]),
    ("batch norm", "NHWC", ["batch_norm"]),
    ("group norm", "NCHW", []),
    ("group norm", "NHWC", ["group_norm_backward"]),
    ("layer norm", "NCHW", ["layer_norm"]),
    ("of_cast", "NCHW", IN_FP32),
    ("outside", "NCHW", IN_FP32),
]


@pytest.fixture
def compiled_first(monkeypatch):
    """Make the functions in C the default choice for fp32 tensors, as on CPUs with AVX-512."""
    monkeypatch.setattr(override, "_default_in_fp32", lambda: override.COMPILED)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_loop_trains_as_with_torchs_kernels(called, monkeypatch, name, options):
    case = CASES[name]
    in_fp32 = case.reference.get("precision") == 32
    use_for_all_sizes(monkeypatch, case.kind)
    found, report = trained(case, **options)
    assert report[case.kind.name].status == "applied"
    assert case.is_expected(called)
    called.clear()
    without = {} if in_fp32 else {case.kind.name: False}
    expected, report = trained(case, **without, **options, **case.reference)
    assert not set(called) & set(case.kind.row.kernels.kernel.functions)
    assert case.kind.name not in report.applied
    if options.get("precision") == "bf16-true":  # later steps start from differently rounded parameters
        count = len(found["gradients"]) // case.steps
        found, expected = ({"gradients": each["gradients"][:count]} for each in (found, expected))
    assert_near(found, expected, case.bounds)


@pytest.mark.usefixtures("compiled_first")
@pytest.mark.parametrize("precision", [32, "bf16-products"])
@pytest.mark.parametrize(("name", "layout", "functions"), TAKING_FP32)
def test_fp32_is_computed_where_torch_is_slower(called, monkeypatch, name, layout, functions, precision):
    case = CASES[name]
    use_for_all_sizes(monkeypatch, case.kind)
    monkeypatch.setattr(products, "SMALLEST_WEIGHT", 1)
    options = {"precision": precision, "channels_last": layout == "NHWC"}
    found, report = trained(case, **options)
    assert case.kind.name in report.applied
    assert called == functions * case.steps
    called.clear()
    expected, report = trained(case, **options, **{case.kind.name: False})
    assert not called
    bound = {"rtol": 1e-4, "atol": 1e-6}
    assert_near(found, expected, {"losses": bound, "state": bound})


@pytest.mark.usefixtures("compiled_first")
@pytest.mark.skipif(not gives_kernels(), reason="torch 2.8 does not say which kernel an operator has")
@pytest.mark.parametrize(("rows", "status"), [(8, "measured"), (2048, "applied")])
def test_kernels_in_fp32_are_torchs_again_where_no_tensor_is_large(rows, status):
    in_force = []

    class Loop(TorchNano):
        def train(self):
            for _ in range(2):  # they are installed again for another model
                model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256))
                model, optimizer = self.setup(model, torch.optim.SGD(model.parameters(), 1e-3))
                for _ in range(LOOKS_FROM + 1):
                    in_force.append(users(("native_layer_norm", "CPU")))
                    self.backward(model(torch.randn(rows, 256)).square().sum())
                    optimizer.step()

    loop = Loop(verbose=False, tune_operators=False)
    loop.train()
    assert in_force == ([1] * LOOKS_FROM + [int(status == "applied")]) * 2
    assert loop.report["fast_norm"].status == status
    assert loop.report["fast_norm"].code == (None if status == "applied" else "too_small")


@pytest.mark.usefixtures("compiled_first")
@pytest.mark.skipif(not gives_kernels(), reason="torch 2.8 does not say which kernel an operator has")
def test_deterministic_mode_brings_back_kernels_that_measured_times_have_taken_out(called, monkeypatch, deterministic):
    # As if all choices had been measured.
    monkeypatch.setattr(override.Override, "_is_chosen", lambda *_: not may_depend_on_times())
    model, in_force = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with accelerated(model, optimizer, verbose=False, tune_operators=False):
        for step in range(LOOKS_FROM + 2):
            if step == LOOKS_FROM + 1:
                deterministic()
            in_force.append((users(("native_layer_norm", "CPU")), bool(called)))
            model(torch.randn(2048, 256)).square().sum().backward()
            optimizer.step()
    assert in_force == [(1, False)] * LOOKS_FROM + [(0, False), (1, False)]
    assert called


@pytest.mark.usefixtures("compiled_first")
@pytest.mark.parametrize(
    "options", [{"exact": True}, {"precision": 16, "fast_norm": False, "fast_linear": False}], ids=["exact", "rounding"]
)
def test_run_beside_another_has_its_own_kernels(called, monkeypatch, options):
    use_for_all_sizes(monkeypatch, BY_NAME["fast_norm"])
    model, other, x = nn.LayerNorm(256), nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256)), torch.randn(8, 256)
    with accelerated(model, verbose=False), accelerated(other, verbose=False, **options):
        other(x).sum().backward()
        assert not called
        model(x).sum().backward()
    assert called == ["layer_norm"]
