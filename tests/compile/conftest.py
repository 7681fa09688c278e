"""What the tests of compiled code share: each starts with nothing compiled."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()
