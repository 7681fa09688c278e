"""The examples' README lists every file in the folder."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in {".py", ".md"} and path.name != "README.md")


@pytest.mark.parametrize("name", FILES)
def test_example_is_listed(name):
    assert name in (FOLDER / "README.md").read_text(encoding="utf-8")
