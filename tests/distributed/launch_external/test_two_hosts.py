"""Between hosts nothing unpickles what a peer has sent that cannot prove to belong to the launch."""

import pytest

from distributed.launch.started import LOOP, environment, run_together, torchrun
from distributed.launch_external.test_launcher import HOSTS, TRAIN, told

pytestmark = pytest.mark.usefixtures("nothing_left")

# Rank 1 sends a pickle in place of whatever it should send; the first exchange of a run is enough.
FORGES = """
import cloudpickle, pickle

class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed by a pickle",)

if os.environ["RANK"] == "1":
    evil = pickle.dumps(Evil())
    cloudpickle.dumps = lambda value: evil
    try:
        from nano_loop.distributed.comm.signed import SignedCodec
        SignedCodec.dumps = lambda self, value: b"p" + evil
    except ImportError:
        pass  # a version that pickles all values
try:
    found()
    tell("trained")
except Exception as failure:
    tell(str(failure))
"""

# Objects of the user's travel, because both have the secret.
SENDS = """
from nano_loop import TorchNano

class Mine:
    def __init__(self, value):
        self.value = value

class Loop(TorchNano):
    def train(self):
        return [each.value for each in [self.broadcast(Mine(self.global_rank + 5), 1)]]

try:
    tell(Loop(verbose=False, timeout=60).train(), found()["weights"])
except Exception as failure:
    tell(str(failure))
"""


def ranks(folder, program, **variables):
    (folder / "ranks.py").write_text(HOSTS + LOOP + TRAIN + program)
    command = [*torchrun("--nproc-per-node", 2), "ranks.py"]
    run_together([command], [environment(HOST_OF="RANK", **variables)], folder)
    return told(folder)


@pytest.mark.slow
def test_ranks_of_a_host_average_before_the_hosts_do(tmp_path):
    """Three ranks on two hosts: weights are those of one process, whatever the hosts."""
    for variables in ({"HOST_OF": "PLACE"}, {"HOST_OF": None}):
        placed = 'os.environ["PLACE"] = str(int(os.environ["RANK"]) // 2)'
        (tmp_path / "ranks.py").write_text(f"import os\n{placed}\n{HOSTS}{LOOP}{TRAIN}tell(found())\n")
        command = [*torchrun("--nproc-per-node", 3), "ranks.py"]
        ((code, output),) = run_together([command], [environment(**variables)], tmp_path)
        assert code == 0, output
        found = [each[0] for each in told(tmp_path, 3)]
        when, then = ("during", ", then between hosts by gloo") if variables["HOST_OF"] else ("at the end of", "")
        assert [each["way"] for each in found] == [f"{when} each backward, through shared memory{then}"] * 3
        assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]
        if variables["HOST_OF"]:
            by_hosts = found[0]["weights"]
    assert by_hosts == pytest.approx(found[0]["weights"], abs=1e-6)


@pytest.mark.slow
def test_forged_pickle_of_a_peer_is_refused(tmp_path):
    (said,), _ = ranks(tmp_path, FORGES)
    assert not (tmp_path / "executed by a pickle").exists()
    assert said.startswith("a message in the name of rank 1 was refused: it is a pickle without a proof")


@pytest.mark.slow
def test_objects_travel_with_a_secret(tmp_path):
    for value, weights in ranks(tmp_path, SENDS, NANO_LOOP_SECRET="0123456789abcdef" * 2):
        assert value == [6]
        assert len(weights) == 4


@pytest.mark.slow  # tests/distributed/test_signed.py shows what is refused, and this that every rank raises
def test_objects_without_a_secret_are_refused_on_all_ranks(tmp_path):
    for (said,) in ranks(tmp_path, SENDS, NANO_LOOP_SECRET=None):
        assert "contains an object that is not plain (__main__.Mine)" in said
        assert "set NANO_LOOP_SECRET to the same 32 or more random characters on all hosts" in said
