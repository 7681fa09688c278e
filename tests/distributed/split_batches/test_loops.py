"""Ranks that share each batch end with the weights, and see the losses, of the plain loop."""

import pytest
import torch

from distributed.small import OPTIONS
from distributed.split_batches.loops import LOOPS, Plain, Shared, trained

#: Relative to the largest number.
TOLERANCES = {"adam": 1e-9, "lbfgs": 1e-6}


@pytest.fixture(scope="module")
def plain():
    return trained(Plain(), LOOPS)


def assert_equal(found, plain):
    wrong = []
    for name, expected in plain.items():
        for number, (one, other) in enumerate(zip(found[name], expected, strict=True)):
            off = float((one - other).abs().max() / other.abs().max())
            if not off <= TOLERANCES.get(name, 1e-12):
                wrong.append(f"{name}[{number}] is off by {off:.1e}")
    assert not wrong, wrong


def test_two_ranks_compute_what_one_process_computes(plain):
    run = Shared(**OPTIONS, split_batches=True)
    assert_equal(run.train([*LOOPS]), plain)
    assert run.report["loaders"].status == "applied"


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_compute_what_one_process_computes(plain, size):
    cpus = [[min(torch.multiprocessing.cpu_count() - 1, rank % 2)] for rank in range(size)]
    run = Shared(**OPTIONS | {"num_processes": size, "cpu_for_each_process": cpus}, split_batches=True)
    assert_equal(run.train([*LOOPS]), plain)
