"""The C functions are exact at every instruction level, and only read and write their arguments."""

import os
import platform
import random
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kernels.csrc import recorded_calls
from nano_loop.config.environment import kernels_choice
from nano_loop.cpu import read_machine
from nano_loop.kernels import bernoulli, compiler
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.linear import product

NATIVE = compiler.NATIVE.flags


class Target(NamedTuple):
    """The target that the functions are compiled for, and the emulator that runs them."""

    flags: tuple[str, ...]
    compiler: str = "gcc"
    emulator: tuple[str, ...] = ()
    instructions: frozenset[str] = frozenset()  # required of the CPU if nothing emulates it

    @property
    def is_here(self):
        programs = (self.compiler, *self.emulator[:1])
        return all(map(shutil.which, programs)) and self.instructions <= read_machine().instruction_sets


OF_LEVELS = {
    level.name: Target(level.flags, instructions=level.instruction_sets)
    if level.machine == "x86_64"
    else Target(("-static", *level.flags), "aarch64-linux-gnu-gcc", ("qemu-aarch64",))
    for level in compiler.LEVELS
}
SANITIZERS = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
#: A statically linked program needs no files of the emulated system.
ON_X86 = {
    "x86-64": Target(("-march=x86-64",)),
    "v3 on a Haswell": Target((*OF_LEVELS["v3"].flags, "-static"), emulator=("qemu-x86_64", "-cpu", "Haswell")),
}
TARGETS = {
    "this processor": Target(NATIVE),
    **(ON_X86 if platform.machine() == "x86_64" else {}),
    **OF_LEVELS,
}
#: `.ci/run` installs the requirements of the others.
HERE = [name for name, target in TARGETS.items() if target.is_here]


@pytest.fixture
def recorder(monkeypatch):
    """Record the calls of C functions."""
    if bernoulli.KERNEL.unavailable is not None:
        pytest.skip(bernoulli.KERNEL.unavailable)
    made = recorded_calls.Recorder(CompiledKernel.__call__)
    monkeypatch.setattr(CompiledKernel, "__call__", lambda self, *arguments: made.call(self, *arguments))
    # Uninitialized memory may happen to hold the result, for example from the same calls in an earlier test, and would
    # then look unwritten. So torch fills new memory with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield made
    torch.use_deterministic_algorithms(False)


def sanitized():
    """Return the target of the current level: recorded calls have memory for the sizes of its vectors."""
    level = compiler.chosen_level(kernels_choice(os.environ), read_machine().instruction_sets)
    return Target((*level.flags, *SANITIZERS))


def driven(target, recorder, folder):
    """Compile the driver for a target, and return its output for the recorded calls, and their number.

    After an error, the output includes that of the sanitizers.
    """
    sources = [
        Path(__file__).with_name("driver.c"),
        *(compiler.SOURCES / f"{name}.c" for name in recorded_calls.SOURCES),
    ]
    flags = (*compiler._FLAGS, *compiler._PARALLEL, *target.flags)
    driver, calls = folder / "driver", folder / "calls"
    subprocess.run([target.compiler, *flags, "-o", str(driver), *map(str, sources), "-lm"], check=True)
    count = recorder.write(calls)
    run = subprocess.run([*target.emulator, str(driver), str(calls)], capture_output=True, text=True, check=False)
    return run.stdout + run.stderr * bool(run.returncode), count


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_functions_are_exact_at_every_level_of_instructions(recorder, tmp_path, name):
    recorded_calls.some_calls(recorder)
    printed, count = driven(TARGETS[name], recorder, tmp_path)
    assert printed == f"{count} calls, 0 wrong\n"


@pytest.mark.slow
def test_functions_read_and_write_their_arguments_alone(recorder, tmp_path):
    recorded_calls.some_calls(recorder)
    if product.KERNEL.unavailable is None:
        recorded_calls.some_recurrences(recorder, in_bf16=True)
    printed, count = driven(sanitized(), recorder, tmp_path)
    assert printed == f"{count} calls, 0 wrong\n"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_calls_are_exact_and_read_and_write_their_arguments_alone(recorder, tmp_path, seed):
    recorded_calls.random_calls(recorder, random.Random(seed), 100)
    printed, count = driven(sanitized(), recorder, tmp_path)
    assert printed == f"{count} calls, 0 wrong\n"


@pytest.mark.slow
def test_driver_tells_what_is_wrong(recorder, tmp_path):
    x = torch.randn(70).bfloat16()
    out = recorded_calls.activations.computed("tanh_forward", x)
    recorder.expect(out, x, 0.1)
    printed, _ = driven(TARGETS["this processor"], recorder, tmp_path)
    assert printed.startswith("call 0, tanh_forward, argument 1: 0.")
    assert printed.endswith("1 calls, 1 wrong\n")
