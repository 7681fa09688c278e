"""A fixture that writes recorded machines to a temporary folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .recording import unpack


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: unpack(f"{name}.txt", tmp_path)
