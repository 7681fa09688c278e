"""Kernels compute fp32 tensors of their own run where torch is slower, and are torch's again where none is large."""

import pytest
import torch
from torch import nn

from nano_loop import TorchNano, accelerated
from nano_loop.kernels import bernoulli, override
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.patch_table import users
from nano_loop.steps.kernel_step import LOOKS_FROM
from steps.kernels.cases import BY_NAME, use_for_all_sizes

#: A norm, whether its images are NHWC, and the functions in C that compute it in fp32: none where torch is as fast.
NORMS = {
    "batch norm in NCHW": (nn.BatchNorm2d(16), False, ["batch_norm", "batch_norm_backward"]),
    "batch norm in NHWC": (nn.BatchNorm2d(16), True, ["batch_norm"]),
    "group norm in NCHW": (nn.GroupNorm(4, 16), False, []),
    "group norm in NHWC": (nn.GroupNorm(4, 16), True, ["group_norm_backward"]),
    "layer norm": (nn.LayerNorm(16), False, ["layer_norm"]),
}


@pytest.fixture
def compiled_first(monkeypatch):
    """Make the functions in C the default choice for fp32 tensors, as on CPUs with AVX-512."""
    monkeypatch.setattr(override, "_default_in_fp32", lambda: override.COMPILED)


@pytest.mark.usefixtures("compiled_first")
@pytest.mark.parametrize("precision", [32, "bf16"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_in_c_in_bf16_and_in_fp32_where_torch_is_slower(called, monkeypatch, name, precision):
    use_for_all_sizes(monkeypatch, BY_NAME["fast_norm"])
    norm, is_nhwc, in_fp32 = NORMS[name]
    kind = "_".join(name.split()[:2])
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), norm)
    with accelerated(model, channels_last=is_nhwc, precision=precision, tune_operators=False, verbose=False):
        model(torch.randn(4, 3, 16, 16)).square().sum().backward()
    assert called == (in_fp32 if precision == 32 else [kind, f"{kind}_backward"])


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


@pytest.mark.parametrize("options", [{}, {"tune_operators": False, "fast_linear": True}])
def test_operators_that_are_named_keep_their_dtype(monkeypatch, options):
    use_for_all_sizes(monkeypatch, BY_NAME["fast_linear"])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 40, bias=False))
    with (
        accelerated(model, precision="bf16", fp32_ops=["linear"], verbose=False, **options),
        torch.autocast("cpu", torch.bfloat16),
    ):
        assert model(torch.ones(96, 64)).dtype is torch.float32


@pytest.mark.skipif(bernoulli.KERNEL.unavailable is not None, reason=str(bernoulli.KERNEL.unavailable))
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_masks_of_dropout_are_the_plain_loops_and_drawn_fast_during_the_run(filled, options):
    model, x = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.25)), torch.ones(64, 1024)

    def dropped():
        torch.manual_seed(1)
        return model[1](x), torch.rand(2)

    plain = dropped()
    with accelerated(model, verbose=False, **options):
        assert all(map(torch.equal, dropped(), plain))
        assert filled == [x.numel()]
    dropped()
    assert filled == [x.numel()]
