"""Each event counts for one kind of work, what no event covers is Python's, and the largest kinds get advice."""

import importlib
import pkgutil

import pytest
import torch

from nano_loop import kernels
from nano_loop.profiling import kinds
from nano_loop.profiling.kinds import FUNCTIONS, KINDS, Circumstances, advice_for, kind_of, lines_of, times_of
from profiling.events import Event


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["aten::addmm"], kinds.PRODUCTS),
        (["aten::convolution_backward"], kinds.PRODUCTS),
        (["aten::copy_", "aten::to"], kinds.CASTS),
        (["aten::native_layer_norm"], kinds.ELEMENTWISE),
        (["aten::_log_softmax"], kinds.ELEMENTWISE),
        (["aten::bmm", "aten::_scaled_dot_product_flash_attention_for_cpu"], kinds.ATTENTION),
        (["aten::_fused_adam_", "Optimizer.step#Adam.step"], kinds.OPTIMIZER),
        (["aten::mm", kinds.CLOSURE_EVENT, kinds.OPTIMIZER_EVENT], kinds.PRODUCTS),
        (["aten::bmm", "_AttentionBackward"], kinds.ATTENTION),
        (["_LossesBackward"], kinds.ELEMENTWISE),
        (["_RecurrentLayerBackward"], kinds.PRODUCTS),
        (["_RecurrentLayer"], kinds.PRODUCTS),
        (["aten::cat", "_RecurrentLayerBackward"], kinds.ELEMENTWISE),
        (["aten::copy_", kinds.AVERAGING_EVENT, "autograd::engine"], kinds.AVERAGING),
        (["aten::stack", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"], kinds.LOADER),
        (["autograd::engine::evaluate_function: AddmmBackward0"], kinds.PYTHON),
    ],
)
def test_event_counts_for_one_kind(names, kind):
    event = None
    for name in reversed(names):
        event = Event(name, cpu_parent=event)
    assert kind_of(event) == kind


def test_functions_of_kernels_are_no_python():
    modules = [
        importlib.import_module(each.name) for each in pkgutil.walk_packages(kernels.__path__, "nano_loop.kernels.")
    ]
    functions = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, torch.autograd.Function) and "kernels" in value.__module__
    }
    computing = {function.__name__ for function in functions} - {"_Root", "_Place"}  # which compute nothing
    assert computing >= FUNCTIONS.keys()
    for name in computing:
        assert kind_of(Event(name)) == kind_of(Event(f"{name}Backward")) != kinds.PYTHON


def test_times_add_up_to_the_time_of_the_steps():
    times = times_of([Event("aten::mm", 30.0), Event("aten::add", 10.0)], wall=100.0)
    assert sum(times.values()) == 100.0
    assert (times[kinds.PRODUCTS], times[kinds.ELEMENTWISE], times[kinds.PYTHON]) == (30.0, 10.0, 60.0)


def test_no_more_than_three_kinds_get_advice_the_largest_first():
    times = dict.fromkeys(KINDS, 1.0) | {kinds.PYTHON: 6.0, kinds.LOADER: 5.0, kinds.OPTIMIZER: 4.0, kinds.CASTS: 3.0}
    found = advice_for(times, Circumstances())
    assert [each.partition(",")[0] for each in found] == [kinds.PYTHON, kinds.LOADER, kinds.OPTIMIZER]
    assert advice_for(dict.fromkeys(KINDS, 0.0), Circumstances()) == []


ON = {"channels_last": True, "compile": True, "fast_attention": "auto", "gradient_compression": "bf16"}


@pytest.mark.parametrize(
    ("kind", "now", "words"),
    [
        (kinds.PRODUCTS, Circumstances(has_convolutions=True), ('precision="bf16"', "channels_last=True")),
        (kinds.PRODUCTS, Circumstances(is_reduced=True, has_convolutions=True), ("channels_last=True",)),
        (kinds.PRODUCTS, Circumstances(ON, is_reduced=True, has_convolutions=True), None),
        (kinds.PRODUCTS, Circumstances(is_reduced=True), None),
        (kinds.PRODUCTS, Circumstances(has_bf16=False), None),
        (kinds.PRODUCTS, Circumstances(has_bf16=False, has_convolutions=True), ("use channels_last=True",)),
        (kinds.ATTENTION, Circumstances(has_bf16=False), None),
        (kinds.ATTENTION, Circumstances(), ('precision="bf16"',)),
        (kinds.ATTENTION, Circumstances(ON, is_reduced=True), None),
        (kinds.ELEMENTWISE, Circumstances(), ("compile=True",)),
        (kinds.ELEMENTWISE, Circumstances(ON), None),
        (kinds.OPTIMIZER, Circumstances(optimizer="AdamW", is_fused=True), ("step less often",)),
        (kinds.OPTIMIZER, Circumstances(optimizer="AdamW"), ("fused_optimizer", "fused=True")),
        (kinds.OPTIMIZER, Circumstances(optimizer="Lion"), ("use Adam, AdamW, SGD or Adagrad",)),
        (kinds.LOADER, Circumstances(), ("num_workers",)),
        (kinds.AVERAGING, Circumstances(), ("gradient_compression",)),
        (kinds.AVERAGING, Circumstances(ON), ("larger batches",)),
    ],
)
def test_advice_is_about_what_is_not_on_yet(kind, now, words):
    advice = advice_for(dict.fromkeys(KINDS, 0.0) | {kind: 1.0}, now)
    assert len(advice) == (words is not None)
    assert all(word in advice[0] for word in words or ())
    if kind in (kinds.PRODUCTS, kinds.AVERAGING) and words is not None and len(words) == 1:
        assert 'precision="bf16"' not in advice[0]


def test_names_are_those_of_torch():
    model, x = torch.nn.Linear(4, 4), torch.rand(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(x, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for each in loader:
            model(each).sum().backward()
            optimizer.step()
    found = {kind_of(event) for event in profile.events()}
    assert {kinds.PRODUCTS, kinds.ELEMENTWISE, kinds.OPTIMIZER, kinds.LOADER} <= found


def test_lines_name_every_kind_and_the_shares_of_the_machine_s_rates():
    rows = [{"kind": kind, "milliseconds": 1.0, "share": 1 / 7} for kind in KINDS]
    rows[0] |= {"share_of_rate": 0.25, "share_of_memory_rate": 0.5}
    lines = [*lines_of({"kinds": rows, "step_ms": 7.0, "profiled_ms": 8.0, "advice": ["do this"]})]
    assert lines[0].split() == ["kind", "of", "work", "ms", "a", "step", "share"]
    assert lines[1].endswith("25% of the machine's rate  50% of its memory's rate")
    assert all(kind in line for kind, line in zip(KINDS, lines[1:], strict=False))
    assert lines[-1] == "1. do this"
