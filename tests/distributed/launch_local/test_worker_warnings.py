"""A worker's warnings are shown on standard error, prefixed with the rank."""

import subprocess
import sys

import pytest

from distributed import small

PROGRAM = """
import os, sys, threading, warnings
import torch
from torch.utils.data import DataLoader
import nano_loop

def quietly():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.warn("recorded")
    assert len(found) == 1

def body(model, loader):
    rank = nano_loop.global_rank()
    warnings.warn("of both ranks")
    warnings.warn("another category", FutureWarning)
    thread = threading.Thread(target=lambda: warnings.warn("of both, in a thread"))
    thread.start()
    thread.join()
    quietly()
    if rank == 1:
        warnings.warn("of rank 1 alone")
    warnings.warn(f"of rank {rank}")
    inside = DataLoader(torch.ones(4, 2), 2, num_workers=CPUS)
    more = DataLoader(torch.ones(4, 2), 2, num_workers=CPUS + 1)
    for x in loader:
        model(x).sum().backward()
    if rank == 1:
        print("printed", file=sys.stderr)

SHARES = SHARES_OF
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
model, loader = torch.nn.Linear(2, 1), DataLoader(torch.ones(8, 2), 2)
before = warnings.showwarning
nano_loop.nano(num_processes=2, verbose=False, cpu_for_each_process=SHARES)(body)(model, loader)
assert warnings.showwarning is before
"""


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_warnings_of_each_rank_are_shown_and_binding_gives_rise_to_none(tmp_path):
    (tmp_path / "warns.py").write_text(PROGRAM.replace("SHARES_OF", repr(small.OPTIONS["cpu_for_each_process"])))
    done = subprocess.run([sys.executable, "warns.py"], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "Warning: " in line or "printed" in line]
    of_rank_1 = [line.removeprefix("[rank 1] ") for line in lines if line.startswith("[rank 1] ")]
    of_rank_0 = [line for line in lines if not line.startswith("[rank ")]
    assert not [line for line in lines if "recorded" in line]
    for shown in (of_rank_0, of_rank_1):
        for text in ("UserWarning: of both ranks", "FutureWarning: another category", "of both, in a thread"):
            assert sum(text in line for line in shown) == 1
        advice = sum("This DataLoader will create" in line for line in shown)
        assert advice == 1, "more workers than the machine has CPUs, which a plain run warns of too"
    own = [line.rpartition(": ")[2] for line in of_rank_1 if "of rank" in line or "printed" in line]
    assert own == ["of rank 1 alone", "of rank 1", "printed"]
    assert [line.rpartition(": ")[2] for line in of_rank_0 if "of rank" in line] == ["of rank 0"]
