"""Fixtures shared by the tests of kernels."""

import re

import pytest
import torch
from loops.pairs import rounding_every_product
from steps.kernels.cases import compute_in_c

from kernels.differentiated import modules
from nano_loop.kernels import bernoulli, build
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.rnn import rnn

_CACHES = (build.level, build.why_none, build.compiled, build._announce_compilation)


def forget_libraries():
    """Make the next use look for libraries, as in a new process."""
    for function in _CACHES:
        function.cache_clear()


@pytest.fixture
def compiled_here(monkeypatch, tmp_path):
    """Compile libraries into an empty folder, whatever the package contains; return the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NANO_LOOP_KERNELS", "compile")
    forget_libraries()
    yield tmp_path / "cache/nano_loop"
    forget_libraries()


@pytest.fixture
def threads():
    """Return a function that sets torch's threads, which are restored after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def called(monkeypatch):
    """The names of the C functions called, except for the draws that compare generators once per process."""
    bool(bernoulli.KERNEL.unavailable)
    names, call = [], CompiledKernel.__call__

    def noting(self, function, *arguments):
        result = call(self, function, *arguments)
        names.append(function)
        return result

    monkeypatch.setattr(CompiledKernel, "__call__", noting)
    return names


@pytest.fixture
def filled(monkeypatch):
    """The numbers of elements of the tensors filled by the compiled function for masks."""
    counts, fill = [], bernoulli.fill
    monkeypatch.setattr(bernoulli, "fill", lambda tensor, *rest: counts.append(tensor.numel()) or fill(tensor, *rest))
    return counts


@pytest.fixture
def for_each_number(threads):
    """Compute a function with several numbers of threads: ``for_each_number(function, *numbers)``."""

    def compute(function, *numbers):
        results = []
        for number in numbers:
            threads(number)
            results.append(function())
        return results

    return compute


@pytest.fixture
def behind_memory(monkeypatch):
    """The memory behind the tensors that kernels allocate, filled with 7s."""
    behind, size = [], 1 << 16

    def with_an_end(*sizes, dtype, memory_format=torch.contiguous_format, **_):
        count = torch.Size(sizes).numel()
        memory = torch.full((count + size,), 7, dtype=dtype)
        behind.append(memory[count:])
        return memory[:count].view(sizes).contiguous(memory_format=memory_format)

    monkeypatch.setattr(torch, "empty", with_an_end)
    return behind


def compute_every_size(patch):
    """Remove nano_loop's size thresholds, so that its functions in C compute everything that they support."""
    for module in modules():
        for name in vars(module):
            if re.fullmatch(r"_?MIN_[A-Z]+", name) and isinstance(getattr(module, name), int):
                patch.setattr(module, name, 1)
    compute_in_c(patch)


@pytest.fixture(scope="module")
def everything_in_c():
    """Compute everything in C that can be, also layers for which torch is faster."""
    with pytest.MonkeyPatch.context() as patch:
        compute_every_size(patch)
        rounding_every_product(patch)
        patch.setattr(rnn, "_FEWEST_STEPS", dict.fromkeys(rnn._FEWEST_STEPS, (4, 4)))
        patch.setattr(rnn, "_FEWEST_BESIDE_ONEDNN", 4)
        patch.setattr(rnn, "is_faster_than_onednn", lambda call: True)
        yield
