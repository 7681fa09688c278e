"""Runs with the same seed start equal, and the picture and the page show the measurements."""

import json

from command_line import run
from PIL import Image

from benchmarks.learning import ends


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
