"""log_casts counts each cast of one step once, with its place, changes no results, and leaves nothing behind."""

import json
from operator import attrgetter

import pytest
import torch
from torch import nn

from nano_loop import TorchNano, nano
from nano_loop.steps import log_casts
from nano_loop.steps.log_casts import CastRecorder


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.last(self.first(x).relu().softmax(-1))


def fit(model, optimizer, loader):
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parts(steps=4):
    torch.manual_seed(0)
    model = Net()
    data = torch.utils.data.TensorDataset(torch.randn(8 * steps, 16), torch.randint(0, 4, (8 * steps,)))
    return model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(data, 8)


def rows(report):
    return {(row.source, row.target, row.part, row.module): row for row in report["log_casts"].data.rows}


def test_the_log_shows_where_each_cast_is(capfd):
    train = nano(precision="bf16", log_casts=True)(fit)
    losses = train(*parts())
    log = train.report["log_casts"].data
    by_place = rows(train.report)
    first = by_place["fp32", "bf16", "forward", "first"]
    assert (first.casts, first.again) == (3, 0)  # of the input, the weight and the bias
    assert first.cast_bytes == (4 + 2) * (8 * 16 + 16 * 32 + 32)
    assert by_place["bf16", "fp32", "backward", "first"].casts >= 2  # gradients of the weight and the bias
    assert by_place["bf16", "fp32", "forward", ""].line.startswith("test_log_casts.py:")  # the output
    assert str(log) in (text := capfd.readouterr().err)
    assert f"  measured  log_casts           {log.summary()}\n" in text
    plain = nano(precision="bf16", verbose=False)(fit)
    assert plain(*parts()) == losses


def test_a_path_gets_json(tmp_path, capfd):
    path = tmp_path / "casts.json"
    train = nano(log_casts=path)(fit)
    train(*parts())
    written = json.loads(path.read_text())
    assert written == train.report["log_casts"].data.as_dict()
    assert written["summary"].startswith("0 casts per step")
    assert train.report["log_casts"].detail.endswith(", in casts.json")
    assert "cast MB" not in capfd.readouterr().err
    results = json.loads(json.dumps(train.report.as_dict()))["results"]
    assert [result["data"] for result in results if result["name"] == "log_casts" and "data" in result] == [written]


def test_too_few_steps_are_said(capfd):
    train = nano(log_casts=True)(fit)
    train(*parts(2))
    assert train.report["log_casts"].code == "few_steps"
    assert "cast MB" not in capfd.readouterr().err


def test_a_log_that_cannot_be_written_ends_no_training(tmp_path):
    path = tmp_path / "folder" / "casts.json"
    path.parent.mkdir()

    def fit_without_folder(*args):
        path.parent.rmdir()
        return fit(*args)

    train = nano(log_casts=path, verbose=False)(fit_without_folder)
    assert len(train(*parts())) == 4
    assert train.report["log_casts"].status == "skipped"
    assert "No such file or directory" in train.report["log_casts"].detail


def test_a_loop_that_fails_in_the_logged_step_ends_the_recording():
    def failing(model, optimizer, loader):
        for step, (x, _) in enumerate(loader):
            model(x).sum().backward()
            if step == log_casts._AFTER_STEPS:
                raise KeyError
            optimizer.step()

    with pytest.raises(KeyError):
        nano(log_casts=True, verbose=False)(failing)(*parts())
    train = nano(log_casts=True, verbose=False)(fit)
    train(*parts())
    assert train.report["log_casts"].status == "measured"


def test_two_optimizers_count_by_the_first():
    class Two(TorchNano):
        def train(self, first, second):
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
            self.setup([first, second], optimizers)
            for _ in range(4):
                (first(torch.ones(2, 16)).sum() + second(torch.ones(2, 16)).sum()).backward()
                for optimizer in optimizers:
                    optimizer.step()

    two = Two(log_casts=True, precision="bf16", verbose=False)
    two.train(Net(), Net())
    assert rows(two.report)["fp32", "bf16", "forward", "first"].casts == 6  # for both models, in one step


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
