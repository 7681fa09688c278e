"""Ranks started by torchrun or another launcher share each batch, without a witness."""

import sys

import pytest
import torch

from distributed.launch.started import environment, free_port, run_together
from distributed.split_batches.loops import Plain, needs_kernels, trained
from distributed.split_batches.test_loops import assert_equal

pytestmark = [needs_kernels, pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]
#: Means over samples or words, with random numbers that would reveal unequal shares.
LOOPS = ("sgd", "adam", "lbfgs", "accumulation", "clipping", "padding", "dropout", "gan")
SCRIPT = f"""
import os, sys
import torch
from distributed.split_batches.loops import Shared

run = Shared(auto_lr=False, verbose=False, timeout=60, split_batches=True)
found = run.train({LOOPS!r})
if os.environ["RANK"] == "0":
    torch.save((found, run.report["loaders"].status, run.report["split_batches"].detail), sys.argv[1])
"""


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_torchrun_compute_what_one_process_computes(size, tmp_path):
    (tmp_path / "ranks.py").write_text(SCRIPT)
    path = ":".join(sys.path)
    variables = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "PYTHONPATH": path}
    environments = [environment(RANK=rank, LOCAL_RANK=rank, OMP_NUM_THREADS=1, **variables) for rank in range(size)]
    ended = run_together([[sys.executable, "ranks.py", "found.pt"]] * size, environments, tmp_path)
    assert [code for code, _ in ended] == [0] * size, ended
    found, status, detail = torch.load(tmp_path / "found.pt", weights_only=True)
    assert_equal(found, trained(Plain(), LOOPS))
    assert status == "applied"
    assert "not compared" in detail
