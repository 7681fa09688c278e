"""log_casts logs one step of the loop, which computes the same with it, and leaves nothing behind."""

import json

import pytest
import torch
from torch import nn
from torch.profiler import ExecutionTraceObserver

from nano_loop import NanoConfigError, TorchNano, nano
from nano_loop.steps import log_casts

pytestmark = pytest.mark.filterwarnings("ignore:.*no bf16 instructions")


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
    return {(row.operator, row.part, row.outputs): row for row in report["log_casts"].data.rows}


def test_the_log_shows_what_each_operator_ran_in(capfd):
    train = nano(precision="bf16", log_casts=True)(fit)
    found = train(*parts())
    linear = rows(train.report)["linear", "forward", "bf16"]
    assert (linear.ran_in, linear.calls) == ("bf16", 1)  # of two rows: one has fp32 inputs, the other bf16 ones
    assert {name for row in rows(train.report).values() for name in row.modules} >= {"first", "last", "Net"}
    assert ("_fused_adamw_", "optimizer", "fp32") in rows(train.report)
    text = capfd.readouterr().err
    assert str(train.report["log_casts"].data) in text
    assert f"  measured  log_casts           {train.report['log_casts'].data.summary()}\n" in text
    assert "execution_trace" not in text
    plain = nano(precision="bf16", verbose=False)(fit)
    assert plain(*parts()) == found


def test_listed_operators_run_where_the_list_says():
    train = nano(precision="bf16", fp32_ops=["softmax"], log_casts=True, verbose=False)(fit)
    train(*parts())
    softmax = rows(train.report)["softmax", "forward", "fp32"]
    assert (softmax.inputs, softmax.ran_in, softmax.casts) == ("bf16", "fp32", 1)


def test_a_path_gets_json(tmp_path, capfd):
    path = tmp_path / "casts.json"
    train = nano(log_casts=path)(fit)
    train(*parts())
    written = json.loads(path.read_text())
    assert written == train.report["log_casts"].data.as_dict()
    assert written["summary"].startswith("0 casts by ")
    assert train.report["log_casts"].detail.endswith(", in casts.json")
    assert "cast MB" not in capfd.readouterr().err
    assert json.loads(json.dumps(train.report.as_dict()))["results"][-1]["data"] == written


@pytest.mark.parametrize("value", ["", 3, None, "no/such/folder/casts.json", "."])
def test_what_is_no_path_is_refused(value):
    with pytest.raises(NanoConfigError, match=r"log_casts.*Pass True for a table, or a path for JSON"):
        nano(log_casts=value)


def test_too_few_steps_are_said(capfd):
    train = nano(log_casts=True)(fit)
    train(*parts(2))
    assert train.report["log_casts"].code == "few_steps"
    assert "cast MB" not in capfd.readouterr().err


def test_another_observer_is_in_the_way(tmp_path):
    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "theirs.json"))
    try:
        train = nano(log_casts=True, verbose=False)(fit)
        train(*parts())
    finally:
        observer.unregister_callback()
    assert train.report["log_casts"].detail == "another ExecutionTraceObserver of torch is active"


@pytest.mark.parametrize("fails", ["begin", "write"])
def test_a_log_that_cannot_be_written_ends_no_training(tmp_path, monkeypatch, fails):
    path = tmp_path / "folder" / "casts.json"
    path.parent.mkdir()

    def fit_without_folder(*args):
        if fails == "begin":
            monkeypatch.setattr("tempfile.tempdir", str(path.parent))
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

    two = Two(log_casts=True, verbose=False)
    two.train(Net(), Net())
    names = rows(two.report)["linear", "forward", "fp32"].modules
    assert sum(names.values()) == rows(two.report)["linear", "forward", "fp32"].calls == 4
