"""Two hosts, which one machine plays: ranks average, and any object travels."""

import pytest

from distributed.launch.started import LOOP, environment, run_together, torchrun
from distributed.launch_external.test_launcher import HOSTS, TRAIN, told

pytestmark = pytest.mark.usefixtures("nothing_left")

# Objects of the user's travel.
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
def test_ranks_of_two_hosts_train_as_those_of_one(tmp_path):
    """Three ranks on two hosts: weights are those of one process, whatever the hosts."""
    for variables in ({"HOST_OF": "PLACE"}, {"HOST_OF": None}):
        placed = 'os.environ["PLACE"] = str(int(os.environ["RANK"]) // 2)'
        (tmp_path / "ranks.py").write_text(f"import os\n{placed}\n{HOSTS}{LOOP}{TRAIN}tell(found())\n")
        command = [*torchrun("--nproc-per-node", 3), "ranks.py"]
        ((code, output),) = run_together([command], [environment(**variables)], tmp_path)
        assert code == 0, output
        found = [each[0] for each in told(tmp_path, 3)]
        when, way = ("during", "by gloo") if variables["HOST_OF"] else ("at the end of", "through shared memory")
        assert [each["way"] for each in found] == [f"{when} each backward, {way}"] * 3
        assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]
        if variables["HOST_OF"]:
            by_hosts = found[0]["weights"]
    assert by_hosts == pytest.approx(found[0]["weights"], abs=1e-6)


@pytest.mark.slow
def test_objects_travel(tmp_path):
    for value, weights in ranks(tmp_path, SENDS):
        assert value == [6]
        assert len(weights) == 4
