"""One to three ranks end with the same weights, whoever has started them and on however many hosts they are."""

import json
import os
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from distributed import small
from distributed.launch.started import environment, free_port, run_together, torchrun
from distributed.launch_external.test_launcher import HOSTS

import nano_loop
from clusters.nodes import OPTIONS, apart
from nano_loop import nano
from nano_loop.cpu import read_machine

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("connected", "nothing_left_on_the_cluster")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SAMPLES = 24  # six batches, which one, two and three ranks divide evenly
RANKS = """
import json, os
from distributed import small
from nano_loop import nano
model, optimizer, loader = small.parts(samples=24)
train = nano(auto_lr=False, verbose=False, timeout=60)(small.fit)
train(model, optimizer, loader)
if os.environ["RANK"] == "0":
    with open("weights", "w") as file:
        json.dump([small.weights(model).tolist(), train.report["gradient_averaging"].detail], file)
"""


def trained(**options):
    """Return the weights that the caller's model has after a run, and how gradients were averaged."""
    model, optimizer, loader = small.parts(samples=SAMPLES)
    train = nano(**{"auto_lr": False, "verbose": False, "timeout": 60} | options)(small.fit)
    train(model, optimizer, loader)
    way = train.report["gradient_averaging"].detail if options["num_processes"] > 1 else ""
    return small.weights(model), way


def by_torchrun(folder, *counts):
    """Return the same of a run of torchrun, with an agent for each host and so many ranks on each."""
    (folder / "ranks.py").write_text(HOSTS + RANKS)
    address = ("--nnodes", len(counts), "--master-addr", "127.0.0.1", "--master-port", free_port())
    agents = [torchrun(*address, "--node-rank", node, "--nproc-per-node", each) for node, each in enumerate(counts)]
    root = Path(nano_loop.__file__).parents[1]
    variables = environment(HOST_OF="GROUP_RANK", PYTHONPATH=f"{root}{os.pathsep}{root / 'tests'}")
    commands = [[*agent, "ranks.py"] for agent in agents]
    for code, output in run_together(commands, [variables] * len(agents), folder):
        assert code == 0, output
    weights, way = json.loads((folder / "weights").read_text())
    return torch.tensor(weights), way


@pytest.mark.parametrize("count", [1, 2, 3])
def test_weights_are_the_same_with_every_launcher(tmp_path, count):
    plain, optimizer, loader = small.parts(samples=SAMPLES, batch_size=4 * count)
    small.fit(plain, optimizer, loader)
    on_one_host, on_two_hosts = {}, {}
    if count > 1:  # Ray is for several processes
        on_one_host["ray"] = trained(**OPTIONS | {"num_processes": count})
    if count <= read_machine().num_threads:
        on_one_host["subprocess"] = trained(num_processes=count)
    else:  # which subprocesses are refused, and no other launcher
        on_one_host["torchrun"] = by_torchrun(tmp_path, count)
    if count > 1:
        on_two_hosts["torchrun"] = by_torchrun(tmp_path, count - 1, 1)
    if count == 3:  # two have room on the first node
        on_two_hosts["ray"] = trained(**OPTIONS | {"num_processes": 3, "worker_init": apart})
    for found in (on_one_host, on_two_hosts):
        for weights, way in found.values():
            torch.testing.assert_close(weights, small.weights(plain), rtol=1e-6, atol=1e-6)
            assert ("gloo" in way) == (found is on_two_hosts)
        # With the same ranks on each host, sums are made in the same order.
        assert len({tuple(weights.tolist()) for weights, _ in found.values()}) <= 1
