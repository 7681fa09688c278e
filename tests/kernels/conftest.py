"""What the tests of kernels share."""

import pytest
import torch

from nano_loop.kernels.build import CompiledKernel


@pytest.fixture
def threads():
    """Set torch's threads, and put them back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def called(monkeypatch):
    """The names of the C functions that were called."""
    names, call = [], CompiledKernel.__call__

    def noting(self, function, *arguments):
        result = call(self, function, *arguments)
        names.append(function)
        return result

    monkeypatch.setattr(CompiledKernel, "__call__", noting)
    return names
