"""nano_loop's Fabric: only a CPU, and no launch by SLURM."""

import os
import subprocess
import sys

import pytest
from lightning_fabric import Fabric

from nano_loop.distributed.comm.ranks import ALONE, Ranks
from nano_loop.integrations.fabric import fabric_arguments


@pytest.mark.parametrize(
    "environ", [{"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train"}, {"WORLD_SIZE": "4"}, {"LT_DEVICES": "3"}, {}]
)
def test_making_one_reads_no_launch_and_leaves_the_environment_alone(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    made = Fabric(**fabric_arguments("32-true", ALONE))
    assert made.world_size == 1
    assert dict(os.environ) == before


@pytest.mark.usefixtures("rank_put_back")
def test_several_ranks_are_told_before_the_run_and_nothing_is_started():
    before = dict(os.environ)
    made = Fabric(**fabric_arguments("32-true", Ranks(2, 4, local_rank=0, local_size=2)))
    assert (made.world_size, made.global_rank, made.local_rank, made.node_rank) == (4, 2, 0, 1)
    assert not made.is_global_zero
    made.launch()  # starts nothing
    assert made.broadcast("mine") == "mine"  # there is no group yet
    made.barrier()
    assert dict(os.environ) == before


@pytest.mark.slow
def test_torchmetrics_is_not_imported_with_fabric(tmp_path):
    """That would import transformers, if both are installed."""
    program = """
import sys, nano_loop
nano_loop.TorchNano()
print([name for name in ("torchmetrics", "transformers", "lightning", "pytorch_lightning") if name in sys.modules])
import torchmetrics
print(torchmetrics.MeanMetric.__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["[]", "MeanMetric"], done.stderr
