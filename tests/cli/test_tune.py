"""`nano-loop tune`: a script is measured and not trained; bad input is one line and exit code 2."""

import json
import os
import subprocess
import sys

import pytest

LOOP = """
import sys, torch, nano_loop
from pathlib import Path

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
    assert done.stderr == "begun ['a']\n"
    assert [row["plain"] for row in found["rows"]][:2] == [False, True]
    assert not (tmp_path / "trained").exists()
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
    again = tune(text, *FIXED, "--no-fused-optimizer")
    assert again.returncode == 0
    assert "kept from an earlier search" in again.stdout
    assert found["line"] in again.stdout


@pytest.mark.parametrize(
    ("text", "options", "name", "words"),
    [
        ("print(1)", [], "train.py", "train.py never calls nano_loop"),
        ("print(1)", [], "missing.py", "missing.py: there is no such file"),
        ("print(1)", ["--precison=32"], "train.py", "No such option"),
        ("print(1)", ["--seconds=0"], "train.py", "--seconds"),
        ("print(1)", ["--precision=8"], "train.py", "--precision 8"),
        (LOOP.replace("{model}", "[model, (x for x in 'ab')]"), [], "train.py", "cannot be pickled"),
    ],
    ids=["never calls", "missing", "unknown option", "seconds", "precision", "cannot be copied"],
)
def test_bad_input_is_one_line(tune, text, options, name, words):
    done = tune(text, *options, name=name)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("nano-loop: ")
    assert words in line


def test_script_that_fails_ends_as_under_python(tune):
    done = tune("import sys; sys.exit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
