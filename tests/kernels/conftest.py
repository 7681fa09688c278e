"""What the tests of kernels share."""

import pytest
import torch


@pytest.fixture
def threads():
    """Set torch's threads, and put them back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
