"""Fixtures of the steps' tests, for effects that only a step shows."""

import pytest
import torch
from steps.conftest import machine, step

__all__ = ["machine", "step"]


@pytest.fixture
def compiles_anew():
    """Reset compiled code, because torch treats sizes that differ between tests as dynamic."""
    yield
    torch.compiler.reset()
