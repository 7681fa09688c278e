"""At least 95% of the time of recorded steps of BERT and ResNet-50 is assigned to a kind of work other than the rest.

The records are from `nano-loop profile` in bf16, with torch 2.13 on a two-core AMD EPYC: the mean microseconds per
step, for each chain of events (an operator and its callers), spent outside nested events. ResNet-50 has 16 images of
224²; BERT is that of `benchmarks`, with two of its twelve layers and 4 sequences of 128 tokens: a step of all layers
has the same chains.
"""

import json
from pathlib import Path

import pytest

from nano_loop.profiling import kinds
from nano_loop.profiling.kinds import times_of
from profiling.events import Event

RECORDED = Path(__file__).parent / "recorded"


def recorded(name):
    """Return the events of a step, and its time."""
    step = json.loads((RECORDED / f"{name}.json").read_text())
    return [event_of(chain, time) for chain, time in step["events"].items()], step["wall"]


def event_of(chain, time):
    event = None
    for name in reversed(chain.split("|")):
        event = Event(name, cpu_parent=event)
    event.self_cpu_time_total = time
    return event


@pytest.mark.parametrize("name", ["bert", "resnet50"])
def test_kinds_account_for_95_percent_of_a_step_each_operator_for_the_kind_that_it_is(name):
    events, wall = recorded(name)
    times = times_of(events, wall)
    assert sum(times.values()) == pytest.approx(wall, rel=1e-6)
    assert wall - times[kinds.PYTHON] >= 0.95 * wall
    assert max(times, key=times.get) == kinds.PRODUCTS
    found = {(event.name, kinds.kind_of(event)) for event in events}
    expected = {
        "bert": {
            ("aten::addmm", kinds.PRODUCTS),
            ("aten::mm", kinds.PRODUCTS),
            ("aten::native_layer_norm", kinds.ELEMENTWISE),
            ("aten::native_layer_norm_backward", kinds.ELEMENTWISE),
            ("aten::_fused_adamw_", kinds.OPTIMIZER),
        },
        "resnet50": {
            ("aten::mkldnn_convolution", kinds.PRODUCTS),
            ("aten::convolution_backward", kinds.PRODUCTS),
            ("aten::native_batch_norm", kinds.ELEMENTWISE),
            ("aten::native_batch_norm_backward", kinds.ELEMENTWISE),
            ("aten::_fused_sgd_", kinds.OPTIMIZER),
        },
    }
    assert expected[name] <= found, expected[name] - found
