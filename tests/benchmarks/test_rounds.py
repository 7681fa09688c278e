"""Systems take turns: each begins some round, and none always follows the same other one."""

from itertools import pairwise

import pytest

from benchmarks.rounds import in_turn

NAMES = ["plain", "compile", "nano"]


@pytest.mark.parametrize("number", range(7))
def test_every_round_has_each_once(number):
    assert sorted(in_turn(NAMES, number)) == sorted(NAMES)


def test_each_begins_and_each_ends_some_round():
    rounds = [in_turn(NAMES, number) for number in range(2 * len(NAMES))]
    assert {each[0] for each in rounds} == {each[-1] for each in rounds} == set(NAMES)


def test_none_always_follows_the_same():
    rounds = [in_turn(NAMES, number) for number in range(2)]
    first, second = (set(pairwise(each)) for each in rounds)
    assert not first & second
