"""Between hosts, what is not plain travels with a proof alone, and a proof counts once, for one sender, in one run."""

import pickle

import pytest
import torch

from nano_loop import NanoError
from nano_loop.distributed.comm.signed import SignedCodec, secret_of

SECRET = b"0123456789abcdef0123456789abcdef"


class Mine:
    def __init__(self, value):
        self.value = value


def codec(rank=0, run=b"run", secret=SECRET, collectives=1):
    made = SignedCodec(rank, run, secret)
    for _ in range(collectives):
        made.begin()
    return made


@pytest.mark.parametrize("secret", [None, SECRET])
def test_plain_values_travel_with_and_without_a_secret(secret):
    data = codec(1, secret=secret).dumps({"a": torch.ones(2)})
    assert codec(0, secret=secret).loads(data, 1)["a"].tolist() == [1, 1]


def test_other_objects_travel_with_a_secret():
    assert codec(0).loads(codec(1).dumps([Mine(3)]), 1)[0].value == 3


def test_other_objects_without_a_secret_are_refused_with_their_type_and_what_to_do():
    with pytest.raises(NanoError, match=r"not plain \(.*Mine\): .* travel without a secret.*set NANO_LOOP_SECRET to"):
        codec(secret=None).dumps([Mine(3)])


@pytest.mark.parametrize(
    "received",
    [
        codec(0, secret=SECRET[::-1]),
        codec(0, run=b"another run"),
        codec(0, collectives=2),
    ],
    ids=["another secret", "another run", "a later collective"],
)
@pytest.mark.parametrize("value", [1, Mine(1)], ids=["plain", "pickle"])
def test_proof_is_for_one_secret_one_run_and_one_collective(received, value):
    with pytest.raises(NanoError, match=r"in the name of rank 1 was refused: .*NANO_LOOP_SECRET"):
        received.loads(codec(1).dumps(value), 1)


def test_proof_is_for_one_sender_and_one_content():
    data = codec(1).dumps(1)
    with pytest.raises(NanoError, match="in the name of rank 2 was refused"):
        codec(0).loads(data, 2)
    with pytest.raises(NanoError, match="was refused"):
        codec(0).loads(data[:-1] + b"2", 1)
    with pytest.raises(NanoError, match="was refused"):
        codec(0).loads(codec(1, secret=None).dumps(1), 1)


def test_pickle_is_refused_where_there_is_no_secret():
    with pytest.raises(NanoError, match="a pickle without a proof"):
        codec(0, secret=None).loads(b"p" + pickle.dumps(1), 1)


def test_reason_of_a_sender_that_may_not_send_is_raised_where_it_arrives():
    with pytest.raises(NanoError, match=r"^it has a lock$"):
        codec(0).loads(codec(1).refusal("it has a lock"), 1)


def test_secret_of_the_environment_is_long_enough():
    assert secret_of({}) is None
    assert secret_of({"NANO_LOOP_SECRET": "x" * 32}) == b"x" * 32
    with pytest.raises(NanoError, match=r"NANO_LOOP_SECRET has 5 characters: a secret has at least 32. Make one"):
        secret_of({"NANO_LOOP_SECRET": "short"})
