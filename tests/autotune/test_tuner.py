"""The fastest of the algorithms that are as exact as torch's is kept, and measurements stay within their time."""

import itertools

import pytest
import torch

from autotune.time_for import ALWAYS, Clock, TimeFor
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.tuner import Race, Tuner, fastest

EXACT = torch.linspace(-1, 1, 64)


class Workshop:
    """Algorithms that advance their clock by a given time, and record their calls."""

    def __init__(self):
        self.clock = Clock()
        self.computed = []

    def algorithm(self, name, seconds, error=0.0, raises=None):
        def compute():
            self.computed.append(name)
            self.clock.now += seconds
            if raises is not None:
                raise raises
            return [EXACT + error * EXACT.roll(1)]

        return compute

    def disturbed(self, name, *seconds):
        """Return an algorithm that takes these times, one after another, and then always the last one."""
        return lambda: self.algorithm(name, seconds[min(self.computed.count(name), len(seconds) - 1)])()

    def race(self, reference=None, **race):
        return Race({name: self.algorithm(name, *given) for name, given in race.items()}, "torchs", reference)


@pytest.fixture
def shop():
    return Workshop()


def winner(torchs, other, guess="o", timer=None):
    """Return the winner of a race between torch's algorithm and another, without a reference; by default they tie."""
    ticks = itertools.count()
    timer = timer or (lambda: next(ticks) * 1e-3)
    return fastest(Race({"torchs": torchs, "o": other}, "torchs", None), guess, 1e6, timer).algorithm


def chosen(shop, guess="torchs", **race):
    return fastest(shop.race(**race), guess, 1e6, shop.clock).algorithm


def test_faster_algorithm_is_kept_and_its_gain_known(shop):
    choice = fastest(shop.race(torchs=[0.004], other=[0.003]), "torchs", 1e6, shop.clock)
    assert choice.algorithm == "other"
    assert choice.milliseconds == pytest.approx({"torchs": 4, "other": 3})
    assert choice.gain == pytest.approx(1)


def test_slower_algorithm_is_never_kept_and_not_timed_again_where_it_is_hopeless(shop):
    assert chosen(shop, torchs=[0.004], slow=[0.04], twice=[0.008], close=[0.0045]) == "torchs"
    assert shop.computed.count("slow") == 2  # once to check its exactness, and once more
    assert shop.computed.count("twice") == 3
    assert shop.computed.count("close") > 3


def test_guess_stays_where_it_is_nearly_as_fast(shop):
    assert chosen(shop, torchs=[0.0100], guessed=[0.0104], guess="guessed") == "guessed"
    assert chosen(shop, torchs=[0.0100], guessed=[0.0106], guess="guessed") == "torchs"


def test_algorithm_that_is_less_exact_than_torch_s_replaces_it_only_by_more_and_so_does_the_guess(shop):
    def chosen_over(seconds, guess):
        race = shop.race(torchs=[0.0100], other=[seconds])._replace(pays=1.2, torchs_is_beaten=True)
        return fastest(race, guess, 1e6, shop.clock).algorithm

    assert [chosen_over(seconds, "other") for seconds in (0.0082, 0.0085)] == ["other", "torchs"]
    assert [chosen_over(seconds, "torchs") for seconds in (0.0082, 0.0085)] == ["other", "torchs"]


def test_algorithm_that_was_slower_once_is_not_kept_for_a_disturbed_machine(shop):
    # The first call checks the exactness.
    other = shop.disturbed("other", 0, 0.004, 0.005, 0.004)
    torchs = shop.disturbed("torchs", 0, 0.006, 0.0045, 0.006)
    assert winner(torchs, other, "torchs", shop.clock) == "torchs"


@pytest.mark.parametrize("seconds", [(0.4, 0.004), (1e-5, 1e-3, 1e-5)], ids=["first", "timed"])
def test_algorithm_that_took_long_once_is_tried_again(shop, seconds):
    torchs, other = shop.disturbed("torchs", 2 * seconds[-1]), shop.disturbed("other", *seconds)
    assert winner(torchs, other, "torchs", shop.clock) == "o"


def test_guess_that_is_less_exact_than_torch_s_is_left(shop):
    choice = fastest(shop.race(torchs=[0.004], guessed=[0.001, 0.02]), "guessed", 1e6, shop.clock)
    assert (choice.algorithm, choice.guess) == ("torchs", "torchs")


def test_wrong_algorithm_is_rejected_however_fast(shop):
    assert chosen(shop, torchs=[0.004], wrong=[0.001, 0.02]) == "torchs"
    assert chosen(shop, torchs=[0.004], right=[0.001, 0.005]) == "right"  # like another order of summation


def test_algorithm_may_be_as_inexact_as_torchs_where_there_is_a_reference(shop):
    for error, expected in ((0.11, "other"), (0.13, "torchs")):
        race = shop.race(shop.algorithm("reference", 1), torchs=[0.004, 0.1], other=[0.001, error])
        assert fastest(race, "torchs", 1e6, shop.clock).algorithm == expected


def test_reference_is_as_exact_as_itself_and_computed_once_for_that(shop):
    reference = shop.algorithm("fp32", 0.001)
    race = Race({"torchs": shop.algorithm("torchs", 0.004, 0.1), "fp32": reference}, "torchs", reference)
    assert fastest(race, "torchs", 1e6, shop.clock).algorithm == "fp32"
    assert shop.computed[:3] == ["torchs", "fp32", "torchs"]


def test_algorithm_has_to_be_faster_with_what_its_calls_take_besides(shop):
    for overhead, expected in ((0.002, "other"), (0.003, "torchs")):
        race = shop.race(torchs=[0.004], other=[0.001])._replace(overhead=overhead)
        assert fastest(race, "torchs", 1e6, shop.clock).algorithm == expected


def test_measurement_that_would_take_too_long_is_given_up(shop):
    def tried(seconds, **race):
        shop.computed.clear()
        return fastest(shop.race(**race), "torchs", seconds, shop.clock)

    assert tried(0.1, torchs=[0.1], other=[0.1]) is None
    assert shop.computed == ["torchs"]
    assert tried(0.7, torchs=[0.1], other=[0.1]) is None
    assert shop.computed == ["torchs", "other"]
    assert tried(0.5, torchs=[0.1], other=[0.1], third=[1.0]) is None
    assert tried(0.9, torchs=[0.1], other=[0.09]).algorithm == "other"
    assert tried(0.9, torchs=[0.1], slow=[0.3]).algorithm == "torchs"  # detected immediately


def test_part_of_a_large_tensor_is_compared():
    ones = torch.ones(3, 1 << 17).t()
    assert winner(lambda: [ones], lambda: [ones]) == "o"
    wrong = ones.clone()
    wrong[: len(wrong) // 2] = 0
    assert winner(lambda: [ones], lambda: [wrong]) == "torchs"


def test_values_that_are_no_numbers_reject_only_algorithms_that_have_them_alone():
    nothing = [torch.full((3,), torch.nan)]
    assert winner(lambda: nothing, lambda: nothing) == "o"
    numbers = [torch.ones(3)]
    assert winner(lambda: numbers, lambda: nothing) == "torchs"
    zeros = [torch.zeros(3)]
    assert winner(lambda: zeros, lambda: numbers) == "torchs"


@pytest.mark.parametrize("error", [RuntimeError("not enough memory"), MemoryError()])
def test_algorithm_that_raises_is_left_out_and_without_torchs_there_is_no_choice(shop, error):
    assert chosen(shop, torchs=[0.004], other=[0.001, 0, error]) == "torchs"
    tuner = Tuner(Choices(None), ALWAYS, shop.clock)
    race = shop.race(torchs=[0.004, 0, error], other=[0.001])
    assert tuner.choose("key", "torchs", lambda: race) is None
    assert tuner.choices.get("key") is None  # it is measured where it does not raise
    assert tuner.spent == pytest.approx(0.004)


def test_short_algorithms_are_timed_more_often_than_long_ones(shop):
    chosen(shop, torchs=[1.0], other=[1.0])
    long = len(shop.computed)
    shop.computed.clear()
    chosen(shop, torchs=[1e-5], other=[1e-5])
    assert len(shop.computed) > 2 * long


# --- the tuner ---


def test_nothing_is_measured_where_there_is_no_time_for_it(shop):
    budget = TimeFor(0.21)
    tuner = Tuner(Choices(None), budget, shop.clock)
    race = shop.race(torchs=[0.04], other=[0.01])
    assert tuner.choose("one", "torchs", lambda: race) == "other"
    assert tuner.choose("two", "torchs", lambda: race) is None
    assert tuner.spent == pytest.approx(0.21 - budget.seconds) == pytest.approx(shop.clock.now)


def test_what_an_algorithm_calls_while_it_is_timed_is_measured_later(shop):
    tuner = Tuner(Choices(None), ALWAYS, shop.clock)

    def inner():
        return tuner.choose("inner", "torchs", lambda: shop.race(torchs=[1.0], other=[0.9]))

    def other():
        assert inner() is None
        return shop.algorithm("other", 0.01)()

    race = Race({"torchs": shop.algorithm("torchs", 0.04), "other": other}, "torchs", None)
    assert tuner.choose("outer", "torchs", lambda: race) == "other"
    assert tuner.choices.get("outer").milliseconds == pytest.approx({"torchs": 40, "other": 10})
    assert inner() == "other"
    assert tuner.measured == 2
    assert tuner.spent == pytest.approx(shop.clock.now)
