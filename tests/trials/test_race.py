"""The fastest runner wins, the others drop out early, and what slows one turn down decides nothing."""

import pytest

from nano_loop.trials.race import MOST, Race


class Runner:
    """Takes a time a step that follows from the number of its turn."""

    def __init__(self, *seconds, fails_in=None):
        self.seconds = seconds
        self.turns = 0
        self.fails_in = fails_in

    def take(self, count, timeout):
        self.turns += 1
        if self.turns == self.fails_in:
            raise MemoryError("no room")
        return self.seconds[self.turns % len(self.seconds)]


class Dropped(dict):
    def __call__(self, name, reason):
        self[name] = reason


@pytest.fixture
def race():
    dropped = Dropped()

    def run(keep=None, until=1e9, clock=lambda: 0.0, beside=None, **runners):
        made = Race(runners, until, dropped, (MemoryError,), clock, beside)
        return made, made.run(keep), dropped

    return run


def test_hopeless_runner_is_out_after_a_few_turns(race):
    slow = Runner(0.5)
    _, ranking, dropped = race(fast=Runner(0.1), slow=slow)
    assert ranking == ["fast"]
    assert dropped == {"slow": ""}
    assert slow.turns < MOST / 2


def test_one_slow_turn_puts_nobody_out(race):
    unlucky = Runner(0.1, 0.1, 0.1, 9.0, 0.1, 0.1, 0.1, 0.1)
    made, ranking, _ = race(other=Runner(0.15), unlucky=unlucky)
    assert ranking[0] == "unlucky"
    assert made.ratio("unlucky", "other") == pytest.approx(1.5)


def test_runner_that_is_kept_is_compared_to_the_end(race):
    made, ranking, dropped = race(keep="present", present=Runner(0.2), new=Runner(0.1))
    assert ranking == ["new", "present"]
    assert made.wins("new", "present", 1.9)
    assert not made.wins("new", "present", 2.1)
    assert dropped == {}


def test_runner_that_cannot_win_puts_nobody_out(race):
    plain, present, new = Runner(0.1), Runner(0.3), Runner(0.25)
    made, ranking, dropped = race(keep="present", beside="plain", plain=plain, present=present, new=new)
    assert ranking == ["plain", "new", "present"]
    assert made.wins("new", "present", 1.02)
    assert dropped == {}


def test_runner_that_cannot_win_drops_out_itself_if_it_is_slower(race):
    _, ranking, dropped = race(keep="present", beside="plain", plain=Runner(0.9), present=Runner(0.3), new=Runner(0.2))
    assert ranking == ["new", "present"]
    assert dropped == {"plain": ""}


def test_equal_runners_are_compared_no_longer_than_needed(race):
    first, second = Runner(0.10, 0.11), Runner(0.11, 0.10)
    made, ranking, _ = race(keep="first", first=first, second=second)
    assert first.turns == MOST
    assert {*ranking} == {"first", "second"}
    assert not made.wins("second", "first", 1.02)


def test_runner_that_fails_is_out_and_the_others_go_on(race):
    _, ranking, dropped = race(fast=Runner(0.1, fails_in=2), slow=Runner(0.2), slower=Runner(0.21))
    assert dropped["fast"] == "no room"
    assert ranking[0] == "slow"


def test_race_ends_with_its_time(race):
    times = iter(range(1000))
    first = Runner(0.1)
    race(first=first, second=Runner(0.1), until=6, clock=lambda: float(next(times)))
    assert first.turns < 4
