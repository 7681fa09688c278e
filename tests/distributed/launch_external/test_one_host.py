"""Ranks of one host that a launcher has started are on their own: they see each other's ends by themselves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distributed.launch.started import LOOP, agents, environment, run_together
from distributed.launch_external.test_launcher import HOSTS, TRAIN, told
from nano_loop import NanoError
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch_external.liveness import Liveness
from nano_loop.distributed.launch_external.rendezvous import Host, Presence

pytestmark = pytest.mark.usefixtures("nothing_left")

# Rank 1 is killed in the loop, when the other waits for it.
KILLED = """
import signal, time

@nano(verbose=False, timeout=60)
def train(model, optimizer, loader):
    for step, (x, y) in enumerate(loader):
        if step == 2 and torch.distributed.get_rank() == 1:
            print("killed at", time.time(), flush=True)  # its files end with the run
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        error(model(x), y).backward()
        optimizer.step()

from nano_loop import NanoWorkerError
try:
    train(*parts(4))
except NanoWorkerError as failure:
    tell(str(failure), failure.rank, time.time())
    raise  # else its agent waits for the other one
"""


@pytest.mark.slow
def test_rank_that_is_killed_beside_another_agent_is_named_within_seconds(tmp_path):
    (tmp_path / "ranks.py").write_text(HOSTS + LOOP + TRAIN + KILLED)
    before = shared_folders()
    ended = run_together([[*command, "ranks.py"] for command in agents()], [environment()] * 2, tmp_path)
    message, rank, seen = json.loads((tmp_path / "found 0").read_text())
    assert message.startswith("rank 1 ended its process: a run needs all of its ranks")
    assert rank == 1
    (killed_at,) = re.findall(r"killed at ([\d.]+)", "".join(output for _, output in ended))
    assert seen - float(killed_at) < 5  # and not the timeout of 60
    assert shared_folders() == before


@pytest.mark.slow  # also shown by the rank that is killed beside another agent
def test_two_agents_on_one_host_share_its_memory(tmp_path):
    program = HOSTS + LOOP + TRAIN + "tell(found())"
    (tmp_path / "ranks.py").write_text(program)
    for code, output in run_together([[*each, "ranks.py"] for each in agents()], [environment()] * 2, tmp_path):
        assert code == 0, output
    for (each,) in told(tmp_path):
        assert "shared memory" in each["way"]
        assert each["left as it was"]


def shared_folders():
    return {path.name for path in Path("/dev/shm").glob("nano_loop-*") if _is_ours(path)}


def _is_ours(path):
    """Whether it may be left by a process that has ended; other tests run beside this one."""
    return not Path(f"/proc/{path.name.split('-')[1]}").exists()


HOLD = """
import sys, time
from pathlib import Path
from nano_loop.distributed.launch_external.liveness import Liveness
from nano_loop.distributed.comm.ranks import Ranks
liveness = Liveness(Ranks(1, 2), Path(sys.argv[1]))
import os
if os.fork() == 0:
    time.sleep(60)  # what a rank has forked does not keep it alive
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


def test_process_is_dead_once_it_is_killed_and_not_before(tmp_path):
    tmp_path.chmod(0o700)
    mine = Liveness(Ranks(0, 2), tmp_path)
    assert not mine.is_dead(1)  # it has not come yet
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), start_new_session=True)
    try:
        assert process.stdout.readline() == b"held\n"
        assert not mine.is_dead(1)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert mine.is_dead(1)
        time.sleep(0.3)
        with pytest.raises(NanoError, match="rank 1 ended its process"):
            mine.check()
        mine.has_left = lambda rank: True
        time.sleep(0.3)
        mine.check()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        mine.close()


def test_presence_arrives_as_it_was_sent():
    presence = Presence.here(Host("name", "boot", 3), (0, 2), signs=True)
    assert Presence.from_text(presence.as_text(), 0) == presence


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[" * 100_000,
        "[1, 2, 3, 4]",
        '[["a", "b", "c"], [], "", false]',
        '[["a", "b", 1], ["x"], "", false]',
        '[["a", "b", 1], [0], "", 1]',
        "x" * (1 << 21),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_presence_is_an_error_that_names_the_rank(text):
    with pytest.raises(NanoError, match=r"rank 3 has sent '.*': a rank begins with its host and its CPUs"):
        Presence.from_text(text, 3)
