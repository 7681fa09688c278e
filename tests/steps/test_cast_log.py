"""The log of casts counts each cast once, names its place, and finds tensors that are cast again."""

import json
from operator import attrgetter

import pytest
import torch
from torch import nn

from nano_loop.steps.log_casts import CastRecorder


def logged(function):
    recorder = CastRecorder({})
    try:
        function()
    finally:
        log = recorder.finish()
    return log


def total(log, name):
    return sum(map(attrgetter(name), log.rows))


def under_autocast(function, cache=True):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        return function()


def test_tensors_that_are_cast_again_are_counted():
    layer, x = nn.Linear(8, 4), torch.ones(3, 8)

    def twice():
        layer(x)
        layer(x)

    assert total(logged(lambda: under_autocast(twice, cache=False)), "again") == 3
    # Autocast caches the casts of weights, but not of inputs.
    log = logged(lambda: under_autocast(twice))
    assert (total(log, "casts"), total(log, "again")) == (4, 1)


def test_a_tensor_that_has_changed_is_not_cast_again():
    x = torch.ones(3)

    def changed():
        x.bfloat16()
        x.add_(1)
        x.bfloat16()

    assert total(logged(changed), "again") == 0

    def made_anew():
        for value in range(5):  # each may reuse the previous address
            torch.full((3,), float(value)).bfloat16()

    assert total(logged(made_anew), "again") == 0

    def unchanged():
        x.bfloat16()
        x.half()
        x.bfloat16()

    assert {row.target: row.again for row in logged(unchanged).rows if row.target == "fp16" or row.again} == {
        "bf16": 1,
        "fp16": 0,
    }


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace", "ignore:JIT pass will be deprecated")
def test_lists_composite_operators_and_scripts_are_seen():
    low, high = [torch.ones(3, dtype=torch.bfloat16) for _ in range(2)], [torch.ones(3) for _ in range(2)]
    assert total(logged(lambda: torch._foreach_copy_(low, high)), "casts") == 2
    scripted = torch.jit.trace(lambda x: x.view(x.shape[0], -1).to(torch.bfloat16), torch.ones(2, 2))
    assert total(logged(lambda: scripted(torch.ones(3, 5))), "casts") == 1
    query = torch.ones(2, 3, 4)
    outputs = []
    log = logged(
        lambda: outputs.append(under_autocast(lambda: nn.functional.scaled_dot_product_attention(*[query] * 3)))
    )
    assert total(log, "casts") >= 3
    torch.testing.assert_close(outputs[0].float(), query, rtol=1e-2, atol=0)


def test_copies_within_a_dtype_and_to_integers_are_no_casts():
    def step():
        torch.zeros(3).copy_(torch.ones(3))
        torch.ones(3).long()
        torch.zeros(3)[0] = 1.0

    assert logged(step).rows == ()


def test_the_text_is_sorted_and_the_rest_counted():
    x = torch.ones(1000, 1000)
    small = {name: torch.ones(3, dtype=getattr(torch, name)) for name in ("float16", "float32", "float64", "bfloat16")}

    def step():
        x.bfloat16()
        for first in small.values():
            for second in small.values():
                first.to(second.dtype)
        for first in small.values():
            for second in small.values():
                first.to(second.dtype)

    log = logged(step)
    title, header, first, *_, last = str(log).splitlines()
    assert title == log.summary() == "25 casts per step, 12 of them repeated, moved 6.0 MB"
    assert header.split() == ["cast", "MB", "casts", "again", "cast", "part", "module", "line"]
    assert first.split()[:6] == ["6.00", "1", "0", "fp32", "→", "bf16"]
    assert last == "and 5 rows that move less"
    assert json.loads(json.dumps(log.as_dict())) == log.as_dict()
    assert log.as_dict()["rows"][0]["cast_bytes"] == 6_000_000
