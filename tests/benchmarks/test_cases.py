import statistics
from importlib.util import find_spec

import pytest
import tiny
import torch
from command_line import OWN
from torch._dynamo.utils import counters

from benchmarks import experts, limits, systems
from benchmarks.case import build, perform
from benchmarks.fresh import fresh
from benchmarks.limits import step_flops
from benchmarks.loop import endless, steps
from benchmarks.systems import SYSTEMS, settings_of, why_not
from benchmarks.workloads import ALL, LISTS, UNTUNED, USERS, WORKLOADS
from nano_loop.cpu import read_machine
from nano_loop.precision.autocast.recurrent_layers import can_train_lstms

FORWARD = 2 * 2 * tiny.BATCH * tiny.INPUTS * tiny.OUTPUTS  # at full size, of twice the rows


def job(own_system, **others):
    return {"task": "steps", "workload": f"{OWN}linear", "system": f"{OWN}{own_system}", "small": True, **others}


def test_the_flops_of_a_linear_layer_are_its_product_and_two_of_the_same_size_backwards():
    assert step_flops(tiny.linear(False)) == 3 * FORWARD


def test_attention_is_counted():
    q = torch.randn(1, 2, 32, 8, requires_grad=True)
    work = tiny.linear(True)
    work.batches = [q]
    work.loss = lambda _, x: torch.nn.functional.scaled_dot_product_attention(x, x, x).sum()
    product = 2 * 2 * 32 * 32 * 8
    assert step_flops(work) == 6 * product


def test_the_gates_of_an_lstm_are_counted_once():
    work = WORKLOADS["lstm"](True)
    weights = sum(weight.numel() for name, weight in work.model.named_parameters() if ".weight" in f".{name}")
    weights -= work.model.embedding.weight.numel()
    tokens = work.batches[0][:, 1:].numel()
    assert step_flops(work) == pytest.approx(3 * 2 * tokens * weights, rel=0.01)


def test_each_step_has_its_batch_loaded_in_every_epoch():
    work, loaded = tiny.linear(True), []

    class Loader:
        def __iter__(self):
            for batch in work.batches:
                loaded.append(batch)
                yield batch

    assert len(steps(work.model, work.optimizer, Loader(), work.loss, 3)) == 3
    assert len(loaded) == 3
    assert next(endless([1])) == 1


def test_the_time_is_the_median_of_whole_epochs_after_the_warm_up():
    result = perform(job("counting", workload=f"{OWN}of_two_batches"))
    assert result["first_step_ms"] == 0
    assert result["median_ms"] == pytest.approx(1e3 * statistics.median([(2 + 3) / 2, (4 + 5) / 2]))


def test_the_most_memory_is_what_a_case_had_at_its_worst():
    small, large = (fresh(job(system), limit=60)["peak_rss_mb"] for system in ("plain", "hungry"))
    assert large - small == pytest.approx(tiny.HUNGER_MB, rel=0.2)


NEEDED = {
    "accelerate": "accelerate",
    "nano_hugging_face": "transformers",
    **dict.fromkeys(("ipex", "nano_ipex"), "intel_extension_for_pytorch"),
}
#: Each runs the code of another one or two, with fewer options.
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


OF_TRANSFORMERS = [pytest.param(name, marks=WITHOUT_TRANSFORMERS) for name in UNTUNED if name != "group_norm_unet"]


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


def test_lists_name_all_workloads_and_each_of_them_once():
    assert [*ALL] == [*LISTS["all"]] == [*LISTS["tuned"], *LISTS["untuned"], *LISTS["users"]]
    assert [*WORKLOADS] == [*LISTS["tuned"]]
    assert len(UNTUNED) == 6


@pytest.mark.parametrize("lever", ["", "fused_optimizer", "channels_last"])
def test_a_lever_is_left_out_and_no_other(monkeypatch, lever):
    monkeypatch.setattr(systems, "has_fast_bf16", lambda: True)
    found = perform({"task": "levers", "workload": f"{OWN}convolution", "lever": lever, "small": True})
    expected = {"precision", "fused_optimizer", "channels_last"} - {lever}
    assert expected <= set(found["applied"])
    assert lever not in found["applied"]


def test_an_expert_knows_of_bf16_what_nano_loop_does():
    assert experts.has_fast_bf16() == read_machine().has_fast_bf16


class Libc:
    """Notes the settings of an allocator."""

    def __init__(self):
        self.found = []

    def mallopt(self, parameter, value):
        self.found.append((parameter, value))


@pytest.mark.parametrize("system", ["expert", "expert_compile"])
def test_an_expert_keeps_memory_and_does_the_rest_by_hand(monkeypatch, system):
    libc, compiled = Libc(), []
    monkeypatch.setattr(experts, "has_fast_bf16", lambda: True)
    monkeypatch.setattr(experts.ctypes, "CDLL", lambda _: libc)
    monkeypatch.setattr(torch, "compile", lambda model: (compiled.append(model), model)[1])
    monkeypatch.setitem(counters["stats"], "unique_graphs", 1)
    work = tiny.convolution(True)
    features = []
    work.model[0].register_forward_hook(lambda _, args, out: features.append(out))
    assert len(SYSTEMS[system](work, 1)) == 1
    assert libc.found == [(-3, 1 << 30), (-1, 1 << 30)]
    assert features[0].dtype == torch.bfloat16
    assert features[0].is_contiguous(memory_format=torch.channels_last)
    assert [group["fused"] for group in work.optimizer.param_groups] == [True]
    assert compiled == ([work.model] if system == "expert_compile" else [])


def test_jemalloc_is_loaded_by_the_settings_of_its_process_or_missing(monkeypatch):
    with pytest.raises(RuntimeError, match="jemalloc is not loaded"):
        SYSTEMS["expert_jemalloc"](tiny.linear(True), 1)
    monkeypatch.setattr(experts.ctypes.util, "find_library", {"jemalloc": "libjemalloc.so.2"}.get)
    assert why_not("expert_jemalloc") is None
    assert settings_of("expert_jemalloc")["LD_PRELOAD"] == "libjemalloc.so.2"
    assert "dirty_decay_ms" in settings_of("expert_jemalloc")["MALLOC_CONF"]
    assert settings_of("nano") == {}
    monkeypatch.setattr(experts.ctypes.util, "find_library", lambda _: None)
    assert "jemalloc was not found" in why_not("expert_jemalloc")
    assert settings_of("expert_jemalloc") == {}


def test_a_workload_that_cannot_be_built_says_why_in_a_line():
    assert perform(job("chatty", workload=f"{OWN}without_a_model")) == {"reason": "LookupError: no such model"}


def test_a_python_that_does_not_start_the_case_is_told_by_its_exit_code():
    assert fresh(job("chatty"), limit=60, python="false") == {"reason": "exit code 1"}


def test_products_that_would_take_too_long_are_not_measured(monkeypatch):
    measured = []
    monkeypatch.setattr(limits, "_gflops", lambda size, dtype: measured.append(size) or 0.1 * size)
    assert limits.matmul_gflops(small=False) == {"float32": 409.6, "bfloat16": 409.6}
    assert measured == [*limits.SIZES] * 2
    measured.clear()
    monkeypatch.setattr(limits, "_gflops", lambda size, dtype: measured.append(size) or 0.1)
    assert limits.matmul_gflops(small=False) == {"float32": 0.1, "bfloat16": 0.1}
    assert measured == [limits.SIZES[0]] * 2
