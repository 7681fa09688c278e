"""`nano-loop tune`: a script runs once per candidate, for some steps; bad input gives one line and exit code 2."""

import json
import os
import subprocess
import sys

import pytest

from cli.loops import looped
from nano_loop.cli import SHAPE
from nano_loop.cli.main import main
from nano_loop.cpu.process import BUSY


def loop_of(steps):
    return (
        "import sys\nprint('begun', sys.argv[1:])\n"
        + looped(f"[torch.rand(4, 8)] * {steps}", "num_threads=1, fast_dropout=False")
        + "print('after the training', file=sys.stderr)\n"
    )


WITHOUT_A_LINE = """
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range({steps}):
    optimizer.zero_grad()
    model(torch.rand(4, 8)).square().mean().backward()
    optimizer.step()
raise ValueError("of the script")
"""
FIXED = ["--precision=32", "--num-processes=1", "--num-threads=1", "--no-allocator", "--compile=false"]
ENDLESS = 100_000_000


SHARED = """
import sys, torch
from nano_loop import nano
from torch.utils.data import DataLoader, TensorDataset

@nano(num_processes="auto", split_batches=True, verbose=False)
def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

x = torch.rand(8 * int(sys.argv[1]), 8)
model = torch.nn.Linear(8, 1)
train(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8))
print(train.report.options["num_processes"], train.report["tune"].status)
"""


@pytest.fixture
def tune(tmp_path, monkeypatch, capfd):
    """Return a function that runs the command on a script, and returns its exit code and its output."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)

    def run(text, *options):
        (tmp_path / "train.py").write_text(text)
        return (main(["tune", *options, "train.py", "a"]), *capfd.readouterr())

    return run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_kinds_of_scripts_run_under_each_candidate(tmp_path):
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_COLOR": "1"}
    options = [*FIXED, "--seconds=1", "--plot=times.png", "--json", "train.py", "a"]
    # The first script ends before its time is over, together with its run.
    for text, before in ((loop_of(40), "@nano("), (WITHOUT_A_LINE.format(steps=ENDLESS), "nano_loop.install(")):
        (tmp_path / "train.py").write_text(text)
        command = [sys.executable, "-m", "nano_loop", "tune", *options]
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        found = json.loads(done.stdout)
        assert (done.returncode, found["command"], found["version"]) == (0, "tune", SHAPE)
        assert done.stderr.startswith("tune: train.py unchanged")
        assert "begun" not in done.stderr
        own, plain, *others = found["rows"]
        assert (own["plain"], plain["plain"]) == (False, True)
        assert all(len(row["seconds"]) == 2 for row in (own, plain))
        assert any(row["options"].get("fused_optimizer") is False for row in others)
        assert found["line"].startswith(before)
        assert "num_threads=1" in found["line"]
        assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
        learnt = [path.read_text() for path in (tmp_path / "cache/nano_loop").glob("operators-*.json")]
        assert any('"tune ' in text for text in learnt) or found["waits"] >= BUSY
    assert "fast_dropout" not in {*found["options"]} - {*found["changes"]}  # from the first script


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_numbers_of_processes_that_share_batches_are_timed_and_the_fastest_is_used(tmp_path):
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_COLOR": "1"}
    (tmp_path / "train.py").write_text(SHARED)
    asked = ["--num-processes=auto", "--split-batches", "--seconds=1", "--json"]

    def ran(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=500)

    done = ran("-m", "nano_loop", "tune", *asked, "train.py", "200000")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    counts = [row["options"].get("num_processes") for row in found["rows"]]
    assert 2 in counts
    assert all(row["seconds"] for row in found["rows"]), found["rows"]  # one round, if much slower
    used, status = ran("train.py", "3").stdout.split()
    is_learnt = found["waits"] < BUSY
    assert status == ("applied" if is_learnt else "skipped")
    assert int(used) == (found["changes"].get("num_processes", 1) if is_learnt else 1)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("print(1)", [], "train.py did not train"),
        pytest.param(loop_of(5), [], "train.py takes 5 steps: tune needs 12", marks=pytest.mark.slow),
        pytest.param(
            WITHOUT_A_LINE.format(steps=5), ["--num-processes=2"], "install runs in one process", marks=pytest.mark.slow
        ),
    ],
    ids=["trains nothing", "short", "processes"],
)
def test_script_that_cannot_be_tuned_is_refused_in_one_line(tune, text, options, words):
    code, _, err = tune(text, *options)
    assert code == 2
    (line,) = [line for line in err.splitlines() if not line.startswith("tune: ")]
    assert line.startswith("nano-loop: ")
    assert words in line


@pytest.mark.slow
def test_script_that_fails_ends_as_under_python(tune):
    code, out, err = tune(WITHOUT_A_LINE.format(steps=1))
    assert (code, out) == (1, "")
    assert err.rstrip().endswith("ValueError: of the script")
    assert 'train.py", line 10' in err
    assert tune("import sys; sys.exit(7)")[:2] == (7, "")
