"""Runs of a seed begin alike, and the picture and the page are of what was measured."""

import json

import pytest
from command_line import run
from PIL import Image

from benchmarks.learning import TASKS, curve, ends

SET_BY_SKLEARN = {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}  # at its import, where they are not set


@pytest.mark.filterwarnings("ignore::nano_loop.NanoWarning")  # on a CPU without bf16 instructions
@pytest.mark.parametrize("task", TASKS)
def test_losses_of_a_few_steps_are_alike_in_both_modes(task, monkeypatch):
    for name, value in SET_BY_SKLEARN.items():
        monkeypatch.setenv(name, value)
    plain, fast = (curve(task, mode, seed=1, steps=3)["curve"] for mode in ("plain", "nano"))
    assert len(plain) == 3
    assert [loss for _, loss in fast] == pytest.approx([loss for _, loss in plain], rel=0.02)


def test_picture_and_page_are_of_the_measured_curves(tmp_path):
    picture, text = tmp_path / "learning.png", tmp_path / "learning.md"
    options = ["--only", "diabetes", "--seeds", 1, "--steps", 2, "--picture", picture, "--page", text]
    process = run("benchmarks.learning", *options)
    assert process.returncode == 0, process.stderr
    with Image.open(picture) as drawn:
        found = json.loads(drawn.info["Description"])
    assert [len(runs) for runs in found["diabetes"].values()] == [1, 1]
    assert ends(found) in process.stdout
    assert ends(found) in text.read_text()
