"""Processes started by torchrun, srun or mpirun train together as nano_loop's own workers do."""

import json
import os
import sys
import time

import pytest
import torch
from torch import distributed

from distributed import small
from distributed.launch.started import LOOP, agents, environment, free_port, run_together, torchrun
from nano_loop import NanoError, nano
from nano_loop.cpu import read_machine
from nano_loop.distributed.launch_external.environment import Launch, found_launch

pytestmark = pytest.mark.usefixtures("nothing_left")

# HOST_OF=RANK makes each rank appear to be on its own host.
HOSTS = """
import os, socket
if "RANK" in os.environ:
    os.environ["PLACE"] = str(int(os.environ["RANK"]) // 2)  # two ranks on the first host
if "HOST_OF" in os.environ:
    name = "host " + os.environ[os.environ["HOST_OF"]]
    socket.gethostname = lambda: name
"""
TRAIN = """
@nano(**OPTIONS | {"num_processes": None})
def train(model, optimizer, loader):
    mask = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return fit(model, optimizer, loader), everywhere([mask, torch.get_num_threads()])

def found(train=train):
    before = torch.distributed.is_initialized(), torch.get_num_threads()
    ours = parts(4)
    size, (masks, threads) = (lambda size, each: (size, zip(*each)))(*train(*ours))
    return {
        "size": size,
        "masks": masks,
        "threads": threads,
        "weights": weights(ours[0]),
        "way": train.report["gradient_averaging"].detail,
        "left as it was": before == (torch.distributed.is_initialized(), torch.get_num_threads()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }

def tell(*values):
    rank = os.environ.get("RANK") or os.environ.get("PMI_RANK") or os.environ.get("SLURM_PROCID")
    with open("found " + (rank or os.environ["OMPI_COMM_WORLD_RANK"]), "w") as file:
        json.dump(values, file)

"""
# Two runs with the defaults, one on the CPUs in LISTS, and two in a process group of the user, the last with a DDP.
RUNS = """
def with_ddp():
    model, _, loader = parts(4)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    train = nano(**OPTIONS | {"num_processes": None, "auto_lr": True})(fit)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=args.lr), loader)
    return weights(model), train.report["learning_rate"].detail

first, second = found(), found()
lists = {"num_processes": 2, "cpu_for_each_process": json.loads(os.environ["LISTS"])}
listed = found(nano(**OPTIONS | lists)(train.__wrapped__))
torch.distributed.init_process_group("gloo")
tell(first, second, listed, found(), with_ddp())
torch.distributed.destroy_process_group()
"""


def told(folder, size=2):
    return [json.loads((folder / f"found {rank}").read_text()) for rank in range(size)]


def run(commands, folder, program, size=2, **variables):
    """Run a program with the launchers' command lines, and return the values reported by each rank."""
    (folder / "ranks.py").write_text(HOSTS + LOOP + TRAIN + program)
    environments = [environment(**variables)] * len(commands)
    for code, output in run_together([[*command, "ranks.py"] for command in commands], environments, folder):
        assert code == 0, output
    return told(folder, size)


@pytest.fixture(scope="module")
def expected():
    """Return the final weights of one process with batches of twice the size."""
    names = {}
    exec(LOOP + "\nfound = alone()", names)
    return pytest.approx(names["found"], abs=2e-6)


@pytest.mark.slow
def test_torchrun_on_one_host_trains_twice_on_lists_of_cpus_and_in_a_group_and_a_ddp_of_the_user_s(tmp_path, expected):
    cpus = read_machine().allowed
    lists = [[cpus[-1]], [cpus[0]]] if hasattr(os, "sched_setaffinity") else None
    runs = run([torchrun("--nproc-per-node", 2)], tmp_path, RUNS, OMP_NUM_THREADS=2, LISTS=json.dumps(lists))
    assert [len(each) for each in runs] == [5, 5]
    for weights, rate in (runs[0].pop(), runs[1].pop()):
        assert weights == expected
        assert "your own DistributedDataParallel" in rate
    for each in (*runs[0], *runs[1]):
        assert each["size"] == 2
        assert each["weights"] == expected
        assert "shared memory" in each["way"]
        assert each["left as it was"]
        assert each["threads"] == [2, 2]  # set by the user
        if read_machine().num_threads > 1 and hasattr(os, "sched_getaffinity"):
            mine, other = map(set, each["masks"])
            assert mine
            assert other
            assert not mine & other
    for _, _, listed, _ in runs:
        assert listed["masks"] == lists or lists is None


# the user's objects reach other hosts, too
SENDS = """
class Mine:
    def __init__(self, value):
        self.value = value

class Loop(TorchNano):
    def train(self):
        return self.broadcast(Mine(self.global_rank + 5), 1).value

tell(found(), Loop(verbose=False, timeout=60).train())
"""


@pytest.mark.slow
def test_ranks_of_two_hosts_use_the_network_and_all_cores_of_their_hosts(tmp_path, expected):
    runs = run([torchrun("--nproc-per-node", 2)], tmp_path, SENDS, HOST_OF="RANK", OMP_NUM_THREADS=None)
    for each, sent in runs:
        assert sent == 6
        assert each["OMP_NUM_THREADS"] == "1"  # set by torchrun
        assert each["threads"] == [read_machine().num_threads] * 2
        assert each["masks"][0] == each["masks"][1] or not each["masks"][0]
        assert "by gloo" in each["way"]
        assert each["weights"] == expected
        assert each["left as it was"]


@pytest.mark.slow
def test_three_ranks_of_two_hosts_train_as_those_of_one(tmp_path):
    weights = []
    for host_of, way in (
        ("PLACE", "during each backward, by gloo"),
        (None, "at the end of each backward, through sha"),
    ):
        found = [
            each for (each,) in run([torchrun("--nproc-per-node", 3)], tmp_path, "tell(found())", 3, HOST_OF=host_of)
        ]
        assert all(each["way"].startswith(way) for each in found)
        assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]
        weights.append(found[0]["weights"])
    assert weights[0] == pytest.approx(weights[1], abs=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_more_ranks_than_cores_share_the_cores(tmp_path):
    count = read_machine().num_threads + 1
    for (each,) in run([torchrun("--nproc-per-node", count)], tmp_path, "tell(found())", count, OMP_NUM_THREADS=None):
        assert each["threads"] == [1] * count


@pytest.mark.slow  # other tests cover ranks of two hosts and of one agent
@pytest.mark.parametrize(("host_of", "way"), [(None, "shared memory"), ("GROUP_RANK", "by gloo")])
def test_two_agents_of_torchrun_make_one_run(tmp_path, expected, host_of, way):
    runs = run(agents(), tmp_path, "tell(found(), found())", HOST_OF=host_of)
    for each in (*runs[0], *runs[1]):
        assert (each["size"], each["weights"], each["left as it was"]) == (2, expected, True)
        assert way in each["way"]


FAILS = """
@nano(timeout=60)
def train(model, optimizer, loader):
    for step, (x, y) in enumerate(loader):
        if step == 2 and torch.distributed.get_rank() == 1:
            raise ValueError("a bad batch")
        optimizer.zero_grad()
        error(model(x), y).backward()
        optimizer.step()

train(*parts(4))
"""


@pytest.mark.slow
def test_rank_that_fails_under_torchrun_ends_all(tmp_path):
    (tmp_path / "ranks.py").write_text(LOOP + FAILS)
    # Each rank writes to its own file, because concurrent tracebacks would interleave.
    command = [*torchrun("--nproc-per-node", 2, "--redirects", 3, "--log-dir", tmp_path / "logs"), "ranks.py"]
    started = time.monotonic()
    ((code, _),) = run_together([command], [environment()], tmp_path)
    assert code == 1
    (errors,) = (tmp_path / "logs").rglob("1/stderr.log")
    assert "ValueError: a bad batch" in errors.read_text()
    assert time.monotonic() - started < 60  # without waiting for the timeout of 60 s


LAUNCHERS = {
    "srun": [
        {
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NTASKS": "4",
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_NODELIST": "first-of-the-job,127.0.0.1",
        }
        for rank in range(2)
    ],
    "mpirun": [
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"},  # MPICH's variables; the test sets both
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_processes_with_the_variables_of_a_launcher_find_each_other(tmp_path, launcher, expected):
    (tmp_path / "ranks.py").write_text(LOOP + TRAIN + "tell(found())")
    port = free_port()
    environments = [environment(MASTER_PORT=port, **variables) for variables in LAUNCHERS[launcher]]
    for code, output in run_together([[sys.executable, "ranks.py"]] * 2, environments, tmp_path):
        assert code == 0, output
    for (each,) in told(tmp_path):
        assert (each["size"], each["weights"]) == (2, expected)
        assert "shared memory" in each["way"]
        assert each["left as it was"]


SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # set by sbatch
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"RANK": "1"}, None),
        ({"RANK": "", "WORLD_SIZE": "2"}, None),
        *(({"RANK": "0", "WORLD_SIZE": size}, None) for size in ("", "²")),
        *(({f"{kind}_RANK": "1", f"{kind}_SIZE": "2"}, Launch("mpirun", 1, 2)) for kind in ("OMPI_COMM_WORLD", "PMI")),
        (SRUN, Launch("srun", 1, 2)),
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "2"}, Launch("srun", 1, 2)),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, Launch("mpirun", 3, 4)),
        ({**SRUN, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, Launch("mpirun", 3, 4)),
        ({**SRUN, "RANK": "3", "WORLD_SIZE": "4"}, Launch("torchrun", 3, 4)),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, None),  # a separate run on each host
    ],
)
def test_launch_is_that_of_the_innermost_launcher(variables, launch):
    assert found_launch(variables) == launch


def launched(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_group_of_another_size_than_the_launch_is_refused(monkeypatch, tmp_path):
    launched(monkeypatch, RANK="0", WORLD_SIZE="4")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(NanoError, match=r"in a process group of 1.*torchrun has started 4"):
            nano(verbose=False)(small.fit)(*small.parts())
    finally:
        distributed.destroy_process_group()


def test_launch_that_does_not_say_where_to_meet_is_refused(monkeypatch):
    launched(monkeypatch, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_LOCAL_SIZE="2")
    with pytest.raises(NanoError, match=r"MASTER_ADDR=None.*mpirun -x MASTER_ADDR"):
        nano(verbose=False)(small.fit)(*small.parts())
    assert not torch.distributed.is_initialized()
