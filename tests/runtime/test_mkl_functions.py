"""Tests of nano_loop.runtime.mkl_functions."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest
import torch

from nano_loop.runtime.mkl_functions import FUNCTIONS

#: MKL's names of functions that torch names differently.
OTHER_NAMES = {"ln": "log"}
LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
PROGRAM = """
import torch
from nano_loop import accelerated
called = []
class Noted(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        called.append((function.overloadpacket.__name__, args[0].dtype if args and hasattr(args[0], "dtype") else None))
        return function(*args, **(kwargs or {}))
for dtype in (torch.float32, torch.float32, torch.float64, torch.float64):
    model = torch.nn.Linear(2, 2, dtype=dtype)
    with Noted(), accelerated(model, torch.optim.SGD(model.parameters()), verbose=False):
        print(*(dtype for _, dtype in called if dtype is torch.float64))
print(*(f"{name} {dtype}" for name, dtype in called if dtype), sep="\\n")
"""


def exported_functions() -> set[str]:
    """Return the names of MKL's vector functions in torch's library; the linker includes those that torch calls."""
    with LIBRARY.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
        names = {name.decode() for name in re.findall(rb"\0vms([A-Z][A-Za-z0-9]*)(?=\0)", mapped)}
    library = ctypes.CDLL(str(LIBRARY))
    return {name for name in names if hasattr(library, f"vms{name}") and hasattr(library, f"vmd{name}")}


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch is built without MKL")
def test_functions_are_those_that_torch_has_of_mkl():
    found = {OTHER_NAMES.get(name.lower(), name.lower()) for name in exported_functions()}
    assert found == set(FUNCTIONS)


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch is built without MKL")
def test_first_setup_in_fp32_and_in_fp64_calls_each_once():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    *in_fp64, called = run.stdout.split("\n", 4)
    assert [bool(dtypes) for dtypes in in_fp64] == [False, False, True, True]
    called = called.splitlines()
    for name in FUNCTIONS:
        for dtype in ("torch.float32", "torch.float64"):
            assert called.count(f"{name} {dtype}") == 1
