"""Each library's random numbers depend only on its own seed, in every rank."""

import os
import random

import numpy as np
import pytest
import torch

from nano_loop.data.random_states import diverge_rng, process_states, set_process_states
from nano_loop.distributed.comm.ranks import Ranks, RunContext

SEEDED = {
    "torch": (torch.manual_seed, lambda: torch.rand(3).tolist()),
    "random": (random.seed, random.random),
    "numpy": (lambda seed: np.random.seed(seed % (1 << 32)), lambda: np.random.rand(3).tolist()),
}


@pytest.fixture(autouse=True)
def states_kept():
    states = process_states()
    yield
    set_process_states(states, [True] * 3)


def drawn(library, rank, seed):
    """Return what a library draws in a rank after the first batch, if the other libraries' states differ each time."""
    for seeds, _ in SEEDED.values():
        seeds(int.from_bytes(os.urandom(8), "little") >> 1)
    seeds, draw = SEEDED[library]
    seeds(seed)
    diverge_rng(Ranks(rank, 3, context=RunContext(common_seed=torch.initial_seed())))
    return draw()


@pytest.mark.parametrize("library", SEEDED)
def test_a_library_draws_by_its_own_seed_and_the_rank(library):
    found = [drawn(library, rank, seed) for rank in range(3) for seed in (0, 1)]
    assert found == [drawn(library, rank, seed) for rank in range(3) for seed in (0, 1)]
    assert all(one != other for place, one in enumerate(found) for other in found[:place])


def test_libraries_draw_other_numbers_than_each_other():
    diverge_rng(Ranks(1, 2, context=RunContext(common_seed=torch.initial_seed())))
    _, python, numpy = process_states()
    assert [*python[1][:4]] != numpy[1][:4].tolist()
