"""Later runs of a script use the options found by `nano-loop tune`, unless the script sets others."""

import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import nano_loop
from nano_loop.autotune import choices
from nano_loop.config.options import Options
from nano_loop.config.protocol import COMMAND, Command
from nano_loop.cpu import read_machine
from nano_loop.runtime.settings import Settings, learn, script_of_process

FOUND = {"allocator": False, "channels_last": True}


@pytest.fixture(autouse=True)
def tuned(monkeypatch, tmp_path):
    """A script whose options were measured as the fastest in fp32."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choices, "_opened", {})
    (tmp_path / "train.py").write_text("train()")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    learn(read_machine(), script_of_process(), Options.from_call({}, {}), FOUND)
    monkeypatch.setattr(choices, "_opened", {})  # as in a new process
    return SimpleNamespace(script=tmp_path / "train.py", file=next((tmp_path / "nano_loop").glob("*.json")))


def read(**arguments):
    options = Settings.read(arguments).options
    return {name: getattr(options, name) for name in FOUND} == FOUND


@pytest.mark.parametrize("arguments", [{}, {"verbose": False, "step_time": True}])
def test_next_run_takes_them(arguments):
    assert read(**arguments)


@pytest.mark.parametrize(
    "arguments", [{"allocator": "auto"}, {"channels_last": True}, {"precision": "bf16"}, {"exact": True}]
)
def test_options_that_are_written_stay_and_others_were_not_measured(arguments):
    options = Settings.read(arguments).options
    assert not options.learnt
    assert all(getattr(options, name) == getattr(Options(**arguments), name) for name in FOUND)


def test_environment_stays(monkeypatch):
    monkeypatch.setenv("NANO_LOOP_ALLOCATOR", "auto")
    assert not read()


def test_edited_script_and_one_that_is_measured_or_launched_are_as_written(tuned, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("nano_loop.runtime.settings.take_command", lambda: Command("tune", "", {}))
        assert not read()
    with monkeypatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
            patch.setenv(name, value)
        assert not read()
    assert read()
    tuned.script.write_text("train(more=True)")
    assert not read()
    tuned.script.unlink()
    assert not read()
    assert COMMAND not in os.environ


@pytest.mark.parametrize("text", ["[", "[1]", '{"no_option": 1}', '{"allocator": 3}'])
def test_damaged_choice_counts_as_none(tuned, text):
    content = json.loads(tuned.file.read_text())
    (key,) = content["choices"]
    content["choices"][key][0] = text
    tuned.file.write_text(json.dumps(content))
    assert not read()


def test_report_says_so():
    model = nn.Linear(2, 1)
    with nano_loop.accelerated(model, torch.optim.SGD(model.parameters(), 0.1), step_time=True, verbose=False) as run:
        pass
    assert run.report["tune"].status == "applied"
    assert "channels_last=True" in run.report["tune"].detail
    assert run.report.options["channels_last"] is True


def test_option_that_applies_to_nothing_is_no_error_as_if_it_were_written():
    learn(read_machine(), script_of_process(), Options.from_call({}, {}), {"fast_norm": True})
    model = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nano_loop.accelerated(model, optimizer, verbose=False) as run:
        model(torch.zeros(2, dtype=torch.int64)).sum().backward()
        optimizer.step()
    assert run.report.options["fast_norm"] is True
    with (
        pytest.raises(nano_loop.NanoConfigError, match="fast_norm=True"),
        nano_loop.accelerated(model, optimizer, fast_norm=True, verbose=False),
    ):
        optimizer.step()


# --- num_processes="auto" ---

AUTO = {"num_processes": "auto", "split_batches": True}


def learnt_number(count, **options):
    learn(read_machine(), script_of_process(), Options(**AUTO, **options), {"num_processes": count})


def test_number_of_processes_is_what_was_found_and_else_one():
    assert Settings.read(AUTO).options.processes == 1
    learnt_number(2)
    options = Settings.read(AUTO).options
    assert (options.processes, options.learnt) == (2, {"num_processes": "num_processes=2"})
    for others in ({"num_processes": None}, {**AUTO, "num_processes": 1}, {**AUTO, "precision": "bf16"}):
        assert Settings.read(others).options.processes == 1


def test_number_of_processes_is_taken_where_the_environment_asks_for_it(monkeypatch):
    learnt_number(2)
    for name, value in AUTO.items():
        monkeypatch.setenv(f"NANO_LOOP_{name.upper()}", str(value))
    assert Settings.read({}).options.processes == 2


def test_number_of_processes_is_that_of_these_cores():
    """A container may have fewer cores than the host of the measurement."""
    machine = read_machine()
    more = dataclasses.replace(machine, logical_cpus=(), allowed=())
    learn(more, script_of_process(), Options(**AUTO), {"num_processes": 64})
    assert more.num_threads == machine.num_threads or Settings.read(AUTO).options.processes == 1


def test_report_says_how_to_measure_the_number_of_processes():
    @nano_loop.nano(**AUTO, verbose=False)
    def train(model, optimizer):
        pass

    for count, status in ((None, "skipped"), (1, "applied")):
        if count is not None:
            learnt_number(count, verbose=False)
        model = nn.Linear(2, 1)
        train(model, torch.optim.SGD(model.parameters(), 0.1))
        assert train.report["tune"].status == status
        assert (train.report["tune"].code == "not_measured") == (count is None)
    assert train.report.options["num_processes"] == 1
