"""Shared fixtures for the tests of compiled code: each test starts with nothing compiled."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()
