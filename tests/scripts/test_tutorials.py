"""The code of each page of docs/tutorials runs from top to bottom, and prints what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs/tutorials"
NEEDED = {"images": "torchvision"}
# What needs another environment is not slow, so that it runs there.
PAGES = [
    pytest.param(path.stem, marks=() if path.stem in NEEDED else pytest.mark.slow)
    for path in sorted(TUTORIALS.glob("*.md"))
]


def blocks(page, language):
    text = (TUTORIALS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_tutorial_runs_and_prints_what_it_shows(page, tmp_path):
    if page in NEEDED:
        pytest.importorskip(NEEDED[page])
    program = tmp_path / "program.py"
    program.write_text("\n\n".join(blocks(page, "python")), encoding="utf-8")
    done = subprocess.run([sys.executable, program.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (shown,) = blocks(page, "text")
    assert done.stdout == shown
