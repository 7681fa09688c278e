"""The log of casts counts each cast once, names what caused it, and finds tensors that are cast again."""

import json

import torch
from torch import nn

from nano_loop.precision.cast_log import cast_log
from nano_loop.precision.execution_trace import Recorder


def logged(function, model=None):
    names = {} if model is None else {id(each): name for name, each in model.named_modules()}
    recorder = Recorder(names)
    function()
    return cast_log(recorder.finish())


def row(log, operator, part="forward", **values):
    (found,) = [
        each
        for each in log.rows
        if (each.operator, each.part) == (operator, part) and values.items() <= vars(each).items()
    ]
    return found


def under_autocast(function, cache=True):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        return function()


def test_casts_belong_to_the_operator_that_autocast_casts_for():
    layer, x = nn.Linear(8, 4), torch.ones(3, 8)
    found = row(logged(lambda: under_autocast(lambda: layer(x))), "linear")
    assert (found.inputs, found.ran_in, found.outputs) == ("fp32", "bf16", "bf16")
    elements = 3 * 8 + 8 * 4 + 4
    assert (found.calls, found.casts, found.again, found.cast_bytes) == (1, 3, 0, elements * 6)
    assert found.nbytes == elements * 4 + 3 * 4 * 2


def test_tensors_that_are_cast_again_are_counted():
    layer, x = nn.Linear(8, 4), torch.ones(3, 8)

    def twice():
        layer(x)
        layer(x)

    assert row(logged(lambda: under_autocast(twice, cache=False)), "linear").again == 3
    # Autocast keeps the casts of weights, not those of inputs.
    found = row(logged(lambda: under_autocast(twice)), "linear")
    assert (found.calls, found.casts, found.again) == (2, 4, 1)


def test_a_tensor_that_has_changed_is_not_cast_again():
    x = torch.ones(3)

    def changed():
        x.bfloat16()
        x.add_(1)
        x.bfloat16()

    assert row(logged(changed), "to").again == 0

    def made_anew():
        for value in range(5):  # each may have the address of the one before
            torch.full((3,), float(value)).bfloat16()

    assert row(logged(made_anew), "to").again == 0

    def unchanged():
        x.bfloat16()
        x.half()
        x.bfloat16()

    log = logged(unchanged)
    assert row(log, "to", outputs="bf16").again == 1
    assert row(log, "to", outputs="fp16").again == 0


def test_a_cast_in_the_code_and_its_backward_are_rows_of_their_own():
    model = nn.Sequential(nn.Linear(8, 4))
    x = torch.ones(3, 8)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        output.float().sum().backward()

    log = logged(step, model)
    outward = row(log, "to", outputs="fp32")
    assert (outward.inputs, outward.casts, outward.cast_bytes, outward.nbytes) == ("bf16", 1, 12 * 6, 0)
    of_weights = row(log, "to", "backward", outputs="fp32")
    assert (of_weights.casts, of_weights.modules) == (2, {"0": 2})
    assert row(log, "linear").modules == {"0": 3}


def test_lists_of_tensors_are_casts_too():
    low, high = [torch.ones(3, dtype=torch.bfloat16) for _ in range(2)], [torch.ones(3) for _ in range(2)]
    found = row(logged(lambda: torch._foreach_copy_(low, high)), "_foreach_copy_")
    assert (found.casts, found.cast_bytes) == (2, 36)


def test_views_and_empty_tensors_move_nothing():
    log = logged(lambda: torch.empty(4, 4).t().view(4, 4))
    assert {each.operator: each.nbytes for each in log.rows} == {"empty": 0, "t": 0, "view": 0}


def test_the_text_is_sorted_and_the_rest_counted():
    x = torch.ones(1000, 1000)

    def step():
        x.bfloat16()
        torch.ones(10).half()
        for name in ("exp", "tanh", "sin", "cos", "abs", "neg", "sqrt", "log", "erf", "floor", "ceil", "round"):
            getattr(x, name)()
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            torch.ones(3, dtype=dtype).exp().tanh().sin().cos()

    log = logged(step)
    title, header, first, second, *_, last = str(log).splitlines()
    assert title == log.summary()
    assert title.startswith("2 casts by ")
    assert title.endswith("again, moved 6.0 of 102.0 MB")
    assert header.startswith("cast MB  casts  again  calls  operator")
    assert header.endswith("modules")
    assert first.split() == ["6.00", "1", "0", "1", "to", "forward", "fp32", "fp32", "bf16"]
    assert second.split()[:2] == ["0.00", "1"]
    assert last.startswith("and ")
    assert last.endswith(" rows that move less")
    assert json.loads(json.dumps(log.as_dict())) == log.as_dict()
    assert log.as_dict()["rows"][0]["cast_bytes"] == 6_000_000
