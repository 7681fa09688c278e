"""The C functions in other builds: they only access their arguments, and are exact without AVX2 and with AMX, too."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from nano_loop.kernels.linear import product

FOLDER = Path(__file__).parent
#: Not of the size of objects: where gcc chooses one of two arrays, it measures from the other one.
SANITIZERS = (
    *("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize=object-size", "-fno-sanitize-recover=undefined"),
)
#: Libraries that have to be loaded before all others. Without libstdc++, the sanitizer does not find the function that
#: throws torch's exceptions.
PRELOADED = "libasan.so", "libstdc++.so"
EMULATED_AMX = "-include", str(FOLDER / "emulated_amx.h")
#: Tests that call each function with random sizes, and compare its results with fp64.
TESTS = (
    *("test_exactness.py", "test_activations.py", "test_bernoulli.py"),
    *("test_norms.py", "test_recurrence.py::test_any_sizes_are_right"),
)
#: Those of functions that have an implementation with AMX.
AMX_TESTS = ("test_exactness.py", "test_product.py", "test_attention.py", "test_weight_gradient.py")
WITH_AMX = "(AMX or bf16 or attention or blocked) and not AVX and not without and not norms"


class Build(NamedTuple):
    """Flags behind those of `nano_loop.kernels.compiler`, and the tests that are repeated with this build."""

    flags: tuple[str, ...]
    preloaded: tuple[str, ...] = ()
    tests: tuple[str, ...] = TESTS
    selected: str = "not damaged"


BUILDS = {
    "sanitizers": Build(SANITIZERS, PRELOADED),
    "without AVX2": Build(("-march=x86-64",)),
    "emulated AMX": Build(EMULATED_AMX, (), AMX_TESTS, WITH_AMX),
}


def library(name):
    """Return the path of a library of gcc."""
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("build", BUILDS)
def test_functions_are_exact_in_another_build(tmp_path, build):
    flags, preloaded, tests, selected = BUILDS[build]
    is_emulated = tests == AMX_TESTS
    if is_emulated and product.KERNEL.unavailable is not None:
        pytest.skip(product.KERNEL.unavailable)  # AMX accompanies AVX-512
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec gcc "$@" {" ".join(flags)}\n')
    compiler.chmod(0o755)
    own = {
        "CC": str(compiler),
        "NANO_LOOP_KERNELS": "compile",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "LD_PRELOAD": ":".join(map(library, preloaded)),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # Python and torch do not free everything
        "UBSAN_OPTIONS": "abort_on_error=1",
    }
    options = ["-q", "-x", "-s", "-rs", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "-k", selected]
    command = [sys.executable, "-m", "pytest", *options, *(str(FOLDER / name) for name in tests)]
    done = subprocess.run(command, env=os.environ | own, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[:4000]
    used = ("product", "attention", "weight_gradient") if is_emulated else ("norms",)
    assert all(any((tmp_path / "cache").rglob(f"{name}-*.so")) for name in used)
    assert not is_emulated or "has no AMX" not in done.stdout
