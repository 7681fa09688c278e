"""log_casts logs one step of the loop without changing its results, and leaves nothing behind."""

import json

import pytest
import torch
from torch import nn

from nano_loop import NanoConfigError, TorchNano, nano
from nano_loop.steps import log_casts


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


@pytest.mark.parametrize("value", ["", 3, None, "no/such/folder/casts.json", "."])
def test_what_is_no_path_is_refused(value):
    with pytest.raises(NanoConfigError, match=r"log_casts.*Pass True for a table, or a path for JSON"):
        nano(log_casts=value)


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
