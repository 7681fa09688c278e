"""Ranks of one host that a launcher started have no parent of ours: they delete what killed ones have left."""

import json
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from distributed.launch.started import LOOP, environment, free_port, run_together
from distributed.launch_external.test_launcher import TRAIN

pytestmark = pytest.mark.usefixtures("nothing_left")

# Ranks are killed in the loop, where others wait for them, or after it; rank 0 ends when they are gone.
KILLED = """
import psutil, signal, time
from pathlib import Path
from nano_loop import NanoError

RANK = os.environ["RANK"]
Path(f"process {RANK}").write_text(str(os.getpid()))

def kill(those):
    if RANK in those:
        os.kill(os.getpid(), signal.SIGKILL)

@nano(verbose=False, timeout=5)
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
except NanoError as error:
    tell(str(error))
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
def test_others_end_after_the_timeout_where_a_rank_is_killed_and_leave_nothing(
    in_the_loop, after_it, tmp_path, temporary
):
    folder, port = tmp_path, free_port()
    (folder / "ranks.py").write_text(LOOP + TRAIN + KILLED)
    variables = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TMPDIR": temporary}
    variables |= {"IN_THE_LOOP": in_the_loop, "AFTER_IT": after_it}
    environments = [environment(RANK=rank, **variables) for rank in range(3)]
    ended = run_together([[sys.executable, "ranks.py"]] * 3, environments, folder)
    killed = [int(rank) for rank in in_the_loop + after_it]
    assert [code for code, _ in ended] == [-signal.SIGKILL if rank in killed else 0 for rank in range(3)], ended
    (message,) = json.loads((folder / "found 1").read_text())
    assert message.startswith("rank 1 has waited 5 seconds for rank ")
    processes = [(folder / f"process {rank}").read_text() for rank in range(3)]
    left = [*temporary.glob("nano_loop-*"), *Path("/dev/shm").glob("nano_loop-*")]
    assert [path for path in left if path.name.split("-")[1] in processes] == []
