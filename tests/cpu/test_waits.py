"""Tests of nano_loop.cpu.process."""

import subprocess
import sys
from pathlib import Path

import pytest

from nano_loop.cpu.process import Waits


def write(tasks: Path, **threads: str) -> None:
    for name, text in threads.items():
        (tasks / name).mkdir(exist_ok=True)
        (tasks / name / "schedstat").write_text(text)


def test_share_is_of_the_time_since_the_beginning(tmp_path: Path) -> None:
    write(tmp_path, t1="1000 5000 3\n", t2="0 0 0\n")
    waits = Waits(tmp_path)
    write(tmp_path, t1="1600 5300 9\n", t2="0 0 0\n", t3="0 100 1\n")
    assert waits.share() == pytest.approx(400 / 1000)


@pytest.mark.parametrize("text", ["", "1 2", "words and words"])
def test_nothing_is_known_where_the_system_does_not_count(tmp_path: Path, text: str) -> None:
    write(tmp_path, t1=text)
    assert Waits(tmp_path).share() is None


BUSY = """
import os, subprocess, sys, time
from nano_loop.cpu.process import Waits
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
waits, end = Waits(), time.monotonic() + 1
while time.monotonic() < end:
    pass
other.kill()
other.wait()
print(waits.share())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts waits")
def test_process_that_shares_its_cpu_waits_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=True)
    assert 0.3 < float(done.stdout) < 0.95
