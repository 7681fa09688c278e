"""Tests of nano_loop.cpu.process_memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from nano_loop.cpu import peak_memory, process_memory

MB = 2**20
CHILD = "from nano_loop.cpu import peak_memory; before = peak_memory(); {use}; print(peak_memory() - before)"


def growth(use: str) -> int:
    done = subprocess.run([sys.executable, "-c", CHILD.format(use=use)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_peak_is_kept_after_the_memory_is_given_back() -> None:
    assert 95 * MB < growth("block = bytes([1]) * (100 << 20); del block") < 110 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone lets ru_maxrss begin at what the parent had")
def test_peak_of_a_child_does_not_include_what_its_parent_has_had() -> None:
    child = "from nano_loop.cpu.process_memory import peak_memory; print(peak_memory())"
    parent = f"import subprocess, sys; b = bytes([1]) * (1 << 30); subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 900 * MB


def test_without_proc_the_system_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_memory, "Path", lambda _: tmp_path / "none")
    assert peak_memory() > 10 * MB
