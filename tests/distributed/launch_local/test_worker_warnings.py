"""A worker's warning is shown if rank 0 does not give the same, and not again otherwise."""

import subprocess
import sys

import pytest

from distributed import small
from nano_loop.distributed.launch import worker_warnings
from nano_loop.distributed.launch.worker_warnings import Awaiting

PROGRAM = """
import os, sys, threading, warnings
import torch
from torch.utils.data import DataLoader
import nano_loop

class Notice(DeprecationWarning):
    pass

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
for turn in range(2):
    nano_loop.nano(num_processes=2, verbose=VERBOSE, cpu_for_each_process=SHARES)(body)(model, loader)
    print("=" * 9, file=sys.stderr, flush=True)
assert warnings.showwarning is before
"""


def shown(folder, verbose):
    """What two runs print to standard error, without the lines of source."""
    program = PROGRAM.replace("SHARES_OF", repr(small.OPTIONS["cpu_for_each_process"]))
    (folder / "warns.py").write_text(program.replace("VERBOSE", repr(verbose)))
    done = subprocess.run([sys.executable, "warns.py"], capture_output=True, text=True, timeout=100, cwd=folder)
    assert done.returncode == 0, done.stderr
    runs = done.stderr.split("=" * 9)[:2]
    return [[line for line in run.splitlines() if "Warning: " in line or "printed" in line] for run in runs]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_worker_repeats_no_warning_of_rank_0_s_and_binding_gives_rise_to_none(tmp_path):
    first, second = shown(tmp_path, verbose=False)
    of_rank_1 = [line for line in first if line.startswith("[rank 1] ")]
    assert [line.rpartition(": ")[2] for line in of_rank_1 if "printed" not in line] == ["of rank 1 alone", "of rank 1"]
    assert "[rank 1] printed" in of_rank_1
    of_rank_0 = [line for line in first if line not in of_rank_1]
    for text in ("UserWarning: of both ranks", "FutureWarning: another category", "of both, in a thread", "of rank 0"):
        assert sum(text in line for line in of_rank_0) == 1
    advice = [line for line in first if "This DataLoader will create" in line]
    assert len(advice) == 1, "more workers than the machine has CPUs, which a plain run warns of too"
    repeated = [line for line in second if line.startswith("[rank 1] ") and ("of both" in line or "DataLoader" in line)]
    assert not repeated, "rank 0 has given them in the run before, if not in this one"


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_all_of_them_are_shown_if_that_is_asked_for(tmp_path):
    first, _ = shown(tmp_path, verbose="all")
    assert sum("of both ranks" in line for line in first) == 2
    assert sum(line.startswith("[rank 1] ") and "of both ranks" in line for line in first) == 1


def test_what_rank_0_has_not_given_is_said_once_when_the_worker_has_ended(monkeypatch):
    one, two, on_another_line = (
        ("builtins.UserWarning", *rest) for rest in (("1", "a", 3), ("2", "a", 3), ("2", "a", 4))
    )
    waiting, lines = Awaiting(), []
    for warning, text in ((one, "ONE"), (two, "TWO"), (two, "TWO"), (on_another_line, "TWO, ON ANOTHER LINE")):
        waiting.take({"warned": [*warning], "shown": text})
    monkeypatch.setattr(worker_warnings, "_shown", {one})  # after it has come from the worker
    waiting.show(lines.append)
    waiting.show(lines.append)
    assert lines == ["TWO", "TWO, ON ANOTHER LINE"]
