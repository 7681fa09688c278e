"""`nano-loop profile`: a script is profiled and stopped; bad input gives one line and exit code 2."""

import json
import subprocess
import sys

import pytest

from cli.loops import looped
from nano_loop.cli import SHAPE
from nano_loop.cli.main import main

MODEL = "nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))"


def loop_over(rows, batch=64):
    batches = f"torch.utils.data.DataLoader(torch.rand({rows}, 256), {batch})"
    return looped(batches, "verbose=False", MODEL) + "print('never printed')\n"


@pytest.fixture
def profile(tmp_path):
    def run(text, *options):
        (tmp_path / "train.py").write_text(text)
        command = [sys.executable, "-m", "nano_loop", "profile", *options, "train.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)

    return run


@pytest.mark.slow
def test_step_is_divided_into_kinds_and_the_trace_is_written(profile, tmp_path):
    script = loop_over(40960, 2048).replace("optimizer.step()", "optimizer.step(); time.sleep(0.05)")
    done = profile(script, "--json", "--trace=trace.json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["command"], found["version"]) == (0, "profile", SHAPE)
    assert sum(row["share"] for row in found["kinds"]) == pytest.approx(1.0)
    assert sum(row["milliseconds"] for row in found["kinds"]) == pytest.approx(found["profiled_ms"], rel=0.05)
    by_kind = {row["kind"]: row for row in found["kinds"]}
    for kind in ("matrix products and convolutions", "optimizer", "loader", "norms and elementwise"):
        assert by_kind[kind]["milliseconds"] > 0, kind
    assert by_kind["Python and the rest"]["milliseconds"] > 50
    assert found["step_ms"] > 0
    memory, weights = found["memory"], 4 * (2 * 256 * 512 + 512 + 256)
    assert (memory["parameters"], memory["gradients"], memory["states"]) == (weights, weights, 0)
    layers = {each["layer"]: each["bytes"] for each in memory["layers"]}
    assert layers["1"] == 4 * 2048 * 512  # ReLU's output is saved, its input is not
    assert memory["activations"] == sum(layers.values())
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
    assert "never printed" not in done.stdout + done.stderr
    assert done.stderr == ""  # including torch's lines for each profile


def test_script_of_too_few_steps_is_refused_in_one_line(tmp_path, capfd):
    (tmp_path / "train.py").write_text("print(1)")
    assert main(["profile", str(tmp_path / "train.py")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("nano-loop: ")
    assert "train.py takes fewer than" in line


# Without a line of nano_loop, and with closures, as the trainers of libraries step.
CLOSURES = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.rand(256, 512)

def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss

for _ in range(60):
    optimizer.step(closure)
"""


@pytest.mark.slow
def test_closure_is_no_time_of_the_optimizer_in_a_script_without_a_line(profile):
    done = profile(CLOSURES, "--json")
    assert done.returncode == 0, done.stderr
    shares = {row["kind"]: row["share"] for row in json.loads(done.stdout)["kinds"]}
    assert shares["optimizer"] < 0.3 < shares["matrix products and convolutions"]


@pytest.mark.slow
def test_ranks_wait_for_each_other_in_averaging(profile):
    done = profile(loop_over(4096), "--num-processes=2", "--json")
    assert done.returncode == 0, done.stderr
    times = {row["kind"]: row["milliseconds"] for row in json.loads(done.stdout)["kinds"]}
    assert times["averaging and waiting for ranks"] > times["optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["--channels-last", "NANO_LOOP_CHANNELS_LAST"])
def test_options_act_on_a_script_without_a_line(profile, monkeypatch, by):
    text = CLOSURES.replace(
        "torch.nn.Linear(512, 2048)", "torch.nn.Unflatten(1, (2, 16, 16)), torch.nn.Conv2d(2, 8, 3)"
    )
    text = text.replace("torch.nn.Linear(2048, 1)", "torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 1)")
    assert profile(text).stderr == ""
    if by.startswith("NANO"):
        monkeypatch.setenv(by, "1")
    done = profile(text, *([by] if by.startswith("--") else []))
    assert done.returncode == 0, done.stderr
    assert "applied  channels_last" in done.stderr


@pytest.mark.slow
def test_options_that_cannot_act_are_refused(profile):
    beside = loop_over(2048).replace("\ndef train(", "\ndef other():\n    pass\n\ndef train(")
    for text, options, words in (
        (CLOSURES, ["--precision=bf16-true"], "NANO_LOOP_PRECISION=bf16-true: models keep their parameters in fp32"),
        (CLOSURES, ["--num-processes=2"], "NANO_LOOP_NUM_PROCESSES=2: install runs in one process"),
        (beside, ["--exact"], "train.py did not start a run of nano_loop: options act on functions under @nano"),
    ):
        done = profile(text, *options)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith(f"nano-loop: {words}")
