"""Fingerprints identify diverged ranks."""

import pytest

from nano_loop.distributed.data_parallel.agreement import Fingerprint, refuse_divergence
from nano_loop.errors import NanoError

RATES = (0.1, float("nan"))
ONE = Fingerprint("average", averagings=5, steps=12, added_parameters=0, shapes=9, rates=RATES, arrived=b"\0\1\2")

DIFFERENT = {
    "steps": (ONE._replace(steps=11), r"different numbers of steps: ranks 0, 2 have 12, rank 1 has 11:"),
    "number of rates": (ONE._replace(rates=(0.1,)), r"learning rates differ .*, rank 1 has \[0.1\]"),
    "added_parameters": (
        ONE._replace(added_parameters=2),
        "added parameters and buffers differ at step 12: .*rank 1 has 2",
    ),
    "purpose": (ONE._replace(purpose="sync", shapes=0), "rank 1 has called a model with added parameters"),
    "averagings": (ONE._replace(averagings=4), "backwards differ at step 12: ranks 0, 2 have 5, rank 1 has 4"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_named_with_the_ranks(name):
    other, message = DIFFERENT[name]
    with pytest.raises(NanoError, match=message):
        refuse_divergence([ONE, other, ONE])


def test_what_arrived_may_differ_and_nan_is_nan():
    refuse_divergence([ONE, ONE._replace(arrived=b"\1\0\1", rates=RATES)])
