"""Each event counts as one kind of work, and time without events is Python's.

The recorded steps are from `nano-loop profile` in bf16, with torch 2.13 on a two-core AMD EPYC: the mean microseconds
per step, for each chain of events (an operator and its callers), spent outside nested events. ResNet-50 has 16 images
of 224²; BERT is that of `benchmarks`, with two of its twelve layers and 4 sequences of 128 tokens: a step of all layers
has the same chains.
"""

import importlib
import json
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_loop import kernels
from nano_loop.profiling import kinds
from nano_loop.profiling.kinds import FUNCTIONS, KINDS, kind_of, lines_of, times_of

RECORDED = Path(__file__).parent / "recorded"


@dataclass
class Event:
    """Has the attributes of an event of torch.profiler that nano_loop reads."""

    name: str
    self_cpu_time_total: float = 1.0
    cpu_parent: Any = None


def event_of(names, time=1.0):
    """Return an event with its callers."""
    event = None
    for name in reversed(names):
        event = Event(name, time, cpu_parent=event)
    return event


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
    assert kind_of(event_of(names)) == kind


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
    computing = {function.__name__ for function in functions} - {"_Root", "_Place", "_Derived"}  # these compute nothing
    assert computing >= FUNCTIONS.keys()
    for name in computing:
        assert kind_of(Event(name)) == kind_of(Event(f"{name}Backward")) != kinds.PYTHON


def test_times_add_up_to_the_time_of_the_steps():
    times = times_of([Event("aten::mm", 30.0), Event("aten::add", 10.0)], wall=100.0)
    assert sum(times.values()) == 100.0
    assert (times[kinds.PRODUCTS], times[kinds.ELEMENTWISE], times[kinds.PYTHON]) == (30.0, 10.0, 60.0)


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


def test_lines_name_every_kind():
    rows = [{"kind": kind, "milliseconds": 1.0, "share": 1 / 8} for kind in KINDS]
    lines = [*lines_of({"kinds": rows, "step_ms": 7.0, "profiled_ms": 8.0})]
    assert lines[0].split() == ["kind", "of", "work", "ms", "per", "step", "share"]
    assert all(kind in line for kind, line in zip(KINDS, lines[1:], strict=False))
    assert [line.split()[-1] for line in lines[-2:]] == ["8.000", "7.000"]


@pytest.mark.parametrize("name", ["bert", "resnet50"])
def test_kinds_account_for_95_percent_of_a_recorded_step(name):
    step = json.loads((RECORDED / f"{name}.json").read_text())
    times = times_of([event_of(chain.split("|"), time) for chain, time in step["events"].items()], step["wall"])
    assert sum(times.values()) == pytest.approx(step["wall"], rel=1e-6)
    assert times[kinds.PYTHON] <= 0.05 * step["wall"]
    assert max(times, key=times.get) == kinds.PRODUCTS
