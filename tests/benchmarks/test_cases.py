from importlib.util import find_spec

import pytest
import tiny
import torch
from command_line import OWN

from benchmarks import systems
from benchmarks.case import build, perform
from benchmarks.fresh import fresh
from benchmarks.limits import step_flops
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import LANGUAGE, UNTUNED, USERS, WORKLOADS
from nano_loop.precision.autocast.autocast import can_train_lstms

FORWARD = 2 * 2 * tiny.BATCH * tiny.INPUTS * tiny.OUTPUTS  # at full size, with twice as many rows


def job(own_system, **others):
    return {"task": "steps", "workload": f"{OWN}linear", "system": f"{OWN}{own_system}", "small": True, **others}


def test_the_flops_of_a_linear_layer_are_its_product_and_two_of_the_same_size_backwards():
    assert step_flops(tiny.linear(False)) == 3 * FORWARD


def test_the_gates_of_an_lstm_are_counted_once():
    work = WORKLOADS["lstm"](True)
    weights = sum(weight.numel() for name, weight in work.model.named_parameters() if ".weight" in f".{name}")
    weights -= work.model.embedding.weight.numel()
    tokens = work.batches[0][:, 1:].numel()
    assert step_flops(work) == pytest.approx(3 * 2 * tokens * weights, rel=0.01)


NEEDED = {
    "accelerate": "accelerate",
    "nano_hugging_face": "transformers",
    **dict.fromkeys(("ipex", "nano_ipex"), "intel_extension_for_pytorch"),
}
#: Each runs the code of one or two others, with fewer options.
SAME = {
    *("lightning", "lightning_bf16", "hugging_face", "hugging_face_bf16", "expert_compile", "expert_jemalloc"),
    *("expert_fp32_1_thread", "nano_auto", "nano_auto_1_thread", "nano_fp32_1_thread", "expert_fp32_compile", "jax"),
}
OF_TEST_IPEX = [
    pytest.param(system, marks=pytest.mark.skipif(find_spec(needed) is None, reason=f"{needed} is not installed"))
    for system, needed in NEEDED.items()
]


@pytest.mark.parametrize("system", [*(each for each in SYSTEMS if each not in {*NEEDED, *SAME}), *OF_TEST_IPEX])
def test_a_system_trains_the_workload(system):
    result = fresh(job("plain", workload=f"{OWN}convolution", system=system), limit=110)
    if system == "ipex" and "BF16 weight prepack needs" in result.get("reason", ""):
        pytest.skip("the CPU has no AVX-512, without which IPEX by hand does not optimize for bf16")
    assert set(result) == {"median_ms", "first_step_ms", "peak_rss_mb"}, result


@pytest.mark.parametrize("workload", ["lstm", f"{OWN}no_module"])
def test_compile_that_compiles_nothing_is_no_system(workload):
    if workload == "lstm" and not can_train_lstms(torch.bfloat16):
        pytest.skip("torch cannot train LSTMs in bf16 on this CPU")
    result = fresh(job("plain", workload=workload, system="compile"), limit=110)
    assert result == {"reason": "RuntimeError: it compiled no part of the model, which ran without"}


WITHOUT_TRANSFORMERS = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


OF_TRANSFORMERS = [
    pytest.param(name, marks=WITHOUT_TRANSFORMERS) for name in (*UNTUNED, *LANGUAGE) if name != "group_norm_unet"
]


@pytest.mark.parametrize("name", [*OF_TRANSFORMERS, "group_norm_unet", *USERS])
def test_model_learns_its_batch(name):
    work, losses = build(name, small=True), []
    work.batches = [next(iter(work.batches))]
    original = work.loss

    def loss(model, batch):
        losses.append(original(model, batch))
        return losses[-1]

    work.loss = loss
    assert len(SYSTEMS["nano_auto" if name in USERS else "nano"](work, 6)) == 6
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("lever", ["", "fused_optimizer", "channels_last"])
def test_a_lever_is_left_out_and_no_other(monkeypatch, lever):
    monkeypatch.setattr(systems, "has_fast_bf16", lambda: True)
    found = perform({"task": "levers", "workload": f"{OWN}convolution", "lever": lever, "small": True})
    expected = {"precision", "fused_optimizer", "channels_last"} - {lever}
    assert expected <= set(found["applied"])
    assert lever not in found["applied"]
