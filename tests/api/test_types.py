"""Type checkers see the signature of a decorated function, and the options in their run-time order."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nano_loop.config.declarations import OPTIONS

ROOT = Path(__file__).parents[2]
#: Lines with a comment are errors of that kind; all others are correct.
SOURCE = """\
from typing_extensions import assert_type

import torch
from nano_loop import SetupReport, TorchNano, accelerated, nano


@nano
def plain(model: torch.nn.Module, count: int) -> float:
    return 0.0


@nano(None, False, "subprocess", "bf16", process_group_backend="gloo", verbose=False)
def with_options(model: torch.nn.Module, name: str = "") -> list[int]:
    return []


class Loop:
    @nano(precision="auto")
    def train(self, steps: int) -> str:
        return ""


    @staticmethod
    @nano
    def fit(model: torch.nn.Module) -> int:
        return 0

    @nano
    @staticmethod
    def test(model: torch.nn.Module) -> bytes:
        return b""


class Nano(TorchNano):
    def train(self, steps: int) -> int:
        return steps


net = torch.nn.Linear(1, 1)
assert_type(plain(net, 3), float)
assert_type(plain.report, SetupReport | None)
assert_type(with_options(net, name="a"), list[int])
assert_type(plain.__name__, str)
assert_type(Loop().train(3), str)
assert_type(Loop.train(Loop(), 3), str)
assert_type(Loop.fit(net), int)
assert_type(Loop.test(net), bytes)
with accelerated(net, precision="auto") as run:
    assert_type(run.report, SetupReport | None)
assert_type(Nano(2, False, "subprocess", "gloo", "bf16", verbose=False).train(3), int)
plain(net, "three")  # arg-type
plain(net)  # call-arg
with_options(net, 3)  # arg-type
Loop().train("three")  # arg-type
nano(None, False, "subprocess", "bf16", None, False, True, True)  # call-overload
nano(use_amp=True)  # call-overload
Nano(precison=32)  # call-arg
nano(precision="bf17")  # call-overload
Nano(precision="bf17")  # arg-type
"""


@pytest.mark.slow
def test_types_are_those_of_the_function_and_of_the_options(tmp_path):
    (tmp_path / "program.py").write_text(SOURCE)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "setup.cfg", str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    found = {
        int(line): kind for line, kind in re.findall(r"program\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.M)
    }
    lines = enumerate(SOURCE.splitlines(), 1)
    assert found == {number: line.partition("  # ")[2] for number, line in lines if "  # " in line}, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("call", ["nano", "TorchNano", "accelerated", "install"])
def test_editors_complete_the_options(call):
    import jedi

    script = jedi.Script(f"from nano_loop import {call}\n{call}(", project=jedi.Project(ROOT))
    found = {completion.name for completion in script.complete(2, len(call) + 1)}
    assert {f"{name}=" for name in OPTIONS} <= found
