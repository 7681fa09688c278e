"""The examples with two processes reach the results of one process, because the processes share its batches."""

import re

import pytest
import torch
from distributed.launch.started import agents, run_together

from .running import EXAMPLES, environment, kill_when_it_has_saved, results, run

TWO = ("--num-processes", 2)
GPT = ("--layers", 1, "--heads", 2, "--width", 32, "--context", 32, "--batch-size", 4, "--warmup", 5, "--sample", 20)
STEPS = 60
TINY_GPT = (*GPT, "--precision", 32, "--steps", STEPS, "--eval-every", 20)
ROWS = ("--epochs", 4)


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_refused():
    process = run("digits.py", *TWO, "--batch-size", 3)
    assert process.returncode == 2
    assert "--batch-size 3 does not divide into 2 processes" in process.stderr


@pytest.mark.slow  # tests/distributed and tests/loops cover killed and resumed runs
def test_char_gpt_that_was_killed_in_two_processes_reaches_the_loss_of_one_when_resumed(tmp_path):
    one = results("char_gpt.py", *TINY_GPT, folder=tmp_path)
    checkpoint = tmp_path / "gpt.pt"
    options = (*TWO, *TINY_GPT)
    kill_when_it_has_saved(checkpoint, "char_gpt.py", *options)
    resumed = results("char_gpt.py", *options, "--checkpoint", checkpoint, "--resume", folder=tmp_path)
    assert 0 < resumed["first_step"] < STEPS
    assert resumed["loss"] == pytest.approx(one["loss"], abs=1e-4)


def accuracy(processes, output):
    (text,) = re.findall(rf"^{processes} processes: test accuracy ([0-9.]+)%$", output, re.MULTILINE)
    return float(text)


@pytest.mark.slow
def test_multi_node_trains_the_same_by_itself_and_as_two_hosts(tmp_path):
    plain = run("multi_node.py", *ROWS)
    itself = run("multi_node.py", *ROWS, *TWO, "--save", tmp_path / "itself.pt")
    assert (plain.returncode, itself.returncode) == (0, 0), plain.stderr + itself.stderr
    commands = agents(EXAMPLES / "multi_node.py", *ROWS, "--save", tmp_path / "hosts.pt")
    (first, output), (second, silence) = run_together(commands, [environment()] * 2, tmp_path)
    assert (first, second) == (0, 0), output + silence
    assert "test accuracy" not in silence
    assert accuracy(2, output) == accuracy(2, itself.stdout) == pytest.approx(accuracy(1, plain.stdout), abs=3)
    weights = [torch.load(tmp_path / name) for name in ("itself.pt", "hosts.pt")]
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)
