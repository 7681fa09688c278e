"""`nano-loop tune`: a script is measured and not trained; bad input is one line and exit code 2."""

import json
import os
import subprocess
import sys

import pytest

LOOP = """
import os, signal, sys, torch, nano_loop
from pathlib import Path
from nano_loop.search import search

search.load_of = lambda cpus: 0.0  # tests run beside others

@nano_loop.nano(num_threads=1)
def train(model, optimizer, batches):
    Path("trained").write_text("by a copy")
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

model = torch.nn.Linear(8, 1)
print("begun", sys.argv[1:])
train({model}, torch.optim.SGD(model.parameters(), lr=0.1), [torch.rand(4, 8)] * 3)
print("never printed")
"""
FIXED = ["--precision=32", "--num-processes=1", "--num-threads=1", "--no-allocator", "--compile=false"]


@pytest.fixture
def tune(tmp_path):
    """Give a function that runs the command on a script."""

    def run(text, *options, name="train.py"):
        (tmp_path / "train.py").write_text(text)
        environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_COLOR": "1"}
        command = [sys.executable, "-m", "nano_loop", "tune", *options, name, "a"]
        return subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=150)

    return run


@pytest.mark.slow
def test_script_is_measured_and_not_trained(tune, tmp_path):
    text = LOOP.replace("{model}", "model")
    done = tune(text, *FIXED, "--no-fused-optimizer", "--seconds=20", "--plot=times.png", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["command"], found["version"]) == (0, "tune", 1)
    printed, timing = sorted(done.stderr.splitlines())
    assert (printed, timing[:5]) == ("begun ['a']", "tune:")
    assert [row["plain"] for row in found["rows"]][:2] == [False, True]
    assert not (tmp_path / "trained").exists()
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
    again = tune(text, *FIXED, "--no-fused-optimizer")
    assert again.returncode == 0
    assert f"kept from {found['date']}; --again" in again.stdout
    assert found["line"] in again.stdout
    failed = tune(text.replace("optimizer.step()", "1 / 0"), *FIXED, "--no-fused-optimizer", "--seconds=20")
    assert failed.returncode == 1
    assert failed.stdout == "begun ['a']\n"  # no older result
    assert "1 / 0" in failed.stderr
    assert "ZeroDivisionError: division by zero" in failed.stderr


INTERRUPTED = """
from nano_loop.search.trial_processes import TrialProcesses

take, trials = TrialProcesses.take, {}

def interrupted(trial, *args):
    trials[id(trial)] = trial
    if len(trials) == 3:  # after the options as they are, and the loop without nano_loop
        os.kill(os.getpid(), signal.SIGINT)
    return take(trial, *args)

TrialProcesses.take = interrupted
"""


@pytest.mark.slow
def test_ctrl_c_shows_the_table_so_far(tune):
    text = LOOP.replace("{model}", "model").replace("@nano_loop", f"{INTERRUPTED}\n@nano_loop")
    done = tune(text, "--num-processes=1", "--seconds=60")
    assert done.returncode == 130, done.stderr
    assert "not measured: interrupted" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "options", "name", "words"),
    [
        ("print(1)", [], "train.py", "train.py has called no function under @nano"),
        ("print(1)", [], "missing.py", "missing.py: there is no such file"),
        ("print(1)", ["--precison=32"], "train.py", "No such option"),
        ("print(1)", ["--seconds=0"], "train.py", "--seconds"),
        ("print(1)", ["--plot=tune.xyz"], "train.py", "xyz is no format of it"),
        ("print(1)", ["--plot=no/such/tune.png"], "train.py", "the folder does not exist"),
        ("print(1)", ["--precision=8"], "train.py", "--precision 8"),
        (LOOP.replace("{model}", "[model, (x for x in 'ab')]"), [], "train.py", "cannot be pickled"),
    ],
    ids=["never calls", "missing", "unknown option", "seconds", "picture", "folder", "precision", "cannot be copied"],
)
def test_bad_input_is_one_line(tune, text, options, name, words):
    done = tune(text, *options, name=name)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("nano-loop: ")
    assert words in line


WITHOUT_A_LINE = """
import sys, torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("begun", sys.argv[1:])
for number in range(10_000_000):
    if number == {fails_at}:
        raise ValueError("of the script")
    optimizer.zero_grad()
    model(torch.rand(4, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_script_without_a_line_is_run_under_each_candidate(tune):
    done = tune(WITHOUT_A_LINE.format(fails_at=-1), *FIXED, "--seconds=30", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert done.stderr == "begun ['a']\n"  # by the first process alone
    plain, *others = content["rows"][1:]
    assert plain["plain"]
    assert all(row["milliseconds"] for row in [plain, content["rows"][0]])
    assert any(row["options"].get("fused_optimizer") is False for row in others)
    assert content["line"].startswith("nano_loop.install(")
    assert "num_threads=1" in content["line"]


@pytest.mark.slow
def test_script_without_a_line_that_fails_in_a_trial_is_quoted(tune):
    done = tune(WITHOUT_A_LINE.format(fails_at=1), *FIXED)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "ValueError: of the script" in line


def test_script_that_fails_ends_as_under_python(tune):
    done = tune("import sys; sys.exit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
