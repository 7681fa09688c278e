"""Ranks of one host that a launcher started have no parent of ours: they detect each other's exit."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from distributed.launch.started import LOOP, environment, free_port, run_together
from distributed.launch_external.test_launcher import TRAIN
from nano_loop import NanoError
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch_external import launcher
from nano_loop.distributed.launch_external.launcher import watch_each_other
from nano_loop.distributed.shared_memory.shared_channel import SharedChannel
from nano_loop.distributed.shared_memory.shared_segment import SharedSegment

pytestmark = pytest.mark.usefixtures("nothing_left")

# Ranks are killed in the loop, where others wait for them, or after it; rank 0 ends when they are gone.
KILLED = """
import psutil, signal, time
from pathlib import Path
from nano_loop import NanoWorkerError

RANK = os.environ["RANK"]
Path(f"process {RANK}").write_text(str(os.getpid()))

def kill(those):
    if RANK in those:
        print("killed at", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

@nano(verbose=False, timeout=60)
def train(model, optimizer, loader):
    Path("private").write_text(RANK)
    for step, (x, y) in enumerate(loader):
        if step == 1:
            kill(os.environ["IN_THE_LOOP"])
        optimizer.zero_grad()
        error(model(x), y).backward()
        optimizer.step()

try:
    train(*parts(4)[:2], torch.utils.data.DataLoader(Rows(), 4, num_workers=1))
except NanoWorkerError as failure:
    tell(str(failure), failure.rank, time.time())
kill(os.environ["AFTER_IT"])
for rank in os.environ["AFTER_IT"] if RANK == "0" else "":
    while psutil.Process(int(Path(f"process {rank}").read_text())).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
"""


@pytest.fixture
def temporary():
    """A short folder for temporary files, because the path of a loader's socket is limited to 108 characters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("in_the_loop", "after_it"), [("2", "1"), ("02", "")])
def test_rank_that_is_killed_is_named_within_seconds_and_leaves_nothing(in_the_loop, after_it, tmp_path, temporary):
    folder, port = tmp_path, free_port()
    (folder / "ranks.py").write_text(LOOP + TRAIN + KILLED)
    variables = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TMPDIR": temporary}
    variables |= {"IN_THE_LOOP": in_the_loop, "AFTER_IT": after_it}
    environments = [environment(RANK=rank, **variables) for rank in range(3)]
    ended = run_together([[sys.executable, "ranks.py"]] * 3, environments, folder)
    killed = [int(rank) for rank in in_the_loop + after_it]
    assert [code for code, _ in ended] == [-signal.SIGKILL if rank in killed else 0 for rank in range(3)], ended
    message, rank, seen = json.loads((folder / "found 1").read_text())
    assert f"rank {rank} ended its process: a run needs all of its ranks" in message
    assert str(rank) in in_the_loop
    killed_at = min(map(float, re.findall(r"killed at ([\d.]+)", "".join(output for _, output in ended))))
    assert seen - killed_at < 5  # without waiting for the timeout of 60 s
    processes = [(folder / f"process {rank}").read_text() for rank in range(3)]
    left = [*temporary.glob("nano_loop-*"), *Path("/dev/shm").glob("nano_loop-*")]
    assert [path for path in left if path.name.split("-")[1] in processes] == []


@pytest.mark.parametrize("waited_for", [True, False])
def test_process_is_dead_once_it_is_killed_and_not_before(waited_for, monkeypatch):
    monkeypatch.setattr(launcher, "_INTERVAL", 0.0)
    process, ranks = subprocess.Popen(["sleep", "60"]), Ranks(0, 2)
    watch_each_other(ranks, [os.getpid(), process.pid])
    ranks.check()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its parent may never reap it
    if waited_for:
        process.wait()
    with pytest.raises(NanoError, match="rank 1 ended its process"):
        ranks.check()
    monkeypatch.setattr(SharedSegment, "has_left", lambda segment, rank: True)
    ranks.channel = mock.Mock(SharedChannel, segment=object.__new__(SharedSegment))
    ranks.check()
    process.wait()
