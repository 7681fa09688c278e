"""Fixtures that put recorded and made-up machines into a folder of the test's own."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from .recording import unpack, write


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that unpacks a recorded machine and gives its root folder."""
    return lambda name: unpack(f"{name}.txt", tmp_path)


@pytest.fixture
def planted(tmp_path: Path) -> Callable[[Mapping[str, str]], Path]:
    """Return a function that writes the given files, path to content, and gives their root folder."""

    def plant(files: Mapping[str, str]) -> Path:
        for path, text in files.items():
            write(tmp_path, path, text)
        return tmp_path

    return plant
