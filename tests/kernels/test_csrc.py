"""The C functions in other builds: they only access their arguments, and are exact on a CPU without AVX2, too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
#: Not of the size of objects: where gcc chooses one of two arrays, it measures from the other one.
SANITIZERS = (
    *("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize=object-size", "-fno-sanitize-recover=undefined"),
)
#: Flags behind those of `nano_loop.kernels.compiler`, and libraries that have to be loaded before all others. Without
#: libstdc++, the sanitizer does not find the function that throws torch's exceptions.
BUILDS = {
    "sanitizers": (SANITIZERS, ("libasan.so", "libstdc++.so")),
    "without AVX2": (("-march=x86-64",), ()),
}
#: Tests that call each function with random sizes, and compare its results with fp64.
TESTS = (
    *("test_exactness.py", "test_activations.py", "test_bernoulli.py"),
    *("test_norms.py", "test_recurrence.py::test_any_sizes_are_right"),
)


def library(name):
    """Return the path of a library of gcc."""
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("build", BUILDS)
def test_functions_are_exact_in_another_build(tmp_path, build):
    flags, preloaded = BUILDS[build]
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
    options = ["-q", "-x", "-s", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "-k", "not damaged"]
    command = [sys.executable, "-m", "pytest", *options, *(str(FOLDER / name) for name in TESTS)]
    done = subprocess.run(command, env=os.environ | own, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[:4000]
    assert any((tmp_path / "cache").rglob("norms-*.so"))
