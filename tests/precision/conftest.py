"""The fixtures of the steps' tests, for what shows in a step alone."""

import pytest
import torch
from steps.conftest import machine, step

__all__ = ["machine", "step"]


@pytest.fixture
def compiles_anew():
    """Forget what the test has compiled: torch takes sizes that differ between tests for dynamic ones."""
    yield
    torch.compiler.reset()
