"""With torchrun, a run's files are rank 0's, as with nano_loop's own workers; after the run, all files are real."""

import json

import pytest
import torch

from distributed.launch.started import LOOP, environment, run_together, torchrun
from distributed.launch_external.test_launcher import HOSTS

pytestmark = pytest.mark.usefixtures("nothing_left")

RANKS = """
import ctypes, shutil, sqlite3, tempfile
from pathlib import Path

OPTIONS |= {"num_processes": None}
RANK, HOST_OF = int(os.environ["RANK"]), "HOST_OF" in os.environ
path = str(Path("model.pt").absolute())

@nano(**OPTIONS)
def train(model, time):
    os.makedirs(f"out/{time}", exist_ok=HOST_OF)
    for _ in range(2):
        torch.save((RANK, time), path)
    Path(f"of {'ab'[RANK]}").write_text("x")
    torch.save(RANK, f"shard {RANK}.pt")
    temporary = tempfile.mkstemp()[1]
    torch.distributed.barrier()
    return torch.load("model.pt"), temporary

@nano(**OPTIONS)
def unguarded(model):
    if RANK == 1:
        sqlite3.connect("database")
    torch.distributed.barrier()

def functions():
    return [open, os.open, os.mkdir, os.stat, shutil.rmtree, sqlite3.connect, tempfile.mkstemp, sys.meta_path[:]]

before = functions()
read = [train(Line(), time) for time in range(2)]
try:
    error = unguarded(Line())
except Exception as failure:
    error = str(failure)
told = {
    "read": [value for value, _ in read],
    "temporary": [os.path.exists(path) for _, path in read],
    "error": error,
    "put back": functions() == before,
    "seen": sorted(os.listdir()),
}
ctypes.CDLL(None).close(ctypes.CDLL(None).open(f"by compiled code {RANK}".encode(), os.O_WRONLY | os.O_CREAT, 0o600))
Path(f"told {RANK}").write_text(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.parametrize("host_of", [None, "RANK"], ids=["one host", "two hosts"])
def test_run_writes_rank_0s_files_and_each_rank_reads_its_own_back(host_of, tmp_path):
    temporary, folder = tmp_path / "temporary", tmp_path / "folder"
    for made in (temporary, folder):
        made.mkdir()
    (folder / "ranks.py").write_text(HOSTS + LOOP + RANKS)
    variables = environment(TMPDIR=temporary, HOST_OF=host_of)
    ((code, output),) = run_together([[*torchrun("--nproc-per-node", 2), "ranks.py"]], [variables], folder)
    assert code == 0, output
    first, second = (json.loads((folder / f"told {rank}").read_text()) for rank in range(2))
    for rank, told in enumerate((first, second)):
        assert told["read"] == [[rank, time] for time in range(2)]
        assert told["temporary"] == [True, True]
        assert told["put back"]
        assert {"model.pt", "of a", "out"} < set(told["seen"])
        assert "of b" not in told["seen"]
        assert "database" not in told["seen"]
    for word in ("compiled code", str(folder / "database"), "is_global_zero"):
        assert word in second["error"]
    assert first["error"]
    assert [torch.load(folder / f"shard {rank}.pt") for rank in range(2)] == [0, 1]
    assert torch.load(folder / "model.pt") == (0, 1)
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["0", "1"]
    assert all((folder / f"by compiled code {rank}").exists() for rank in range(2))
    assert list(temporary.glob("nano_loop-*")) == []
