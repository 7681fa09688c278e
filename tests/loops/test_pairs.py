"""The harness itself: it finds each fault that is planted in an accelerated loop."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from . import pairs
from .nested import differences
from .pairs import BF16, EXACT, FUSED, NHWC, SHIPPED, check, run_plain, written_by_hand
from .tasks import ADAM, ConvNet, fit, images, job

#: Each fault gets the arguments of the loop.
FAULTS = {
    "another rate": lambda given: set_option(given, lr=1.001 * rate_of(given)),
    "another weight": lambda given: given["model"].head.bias.data[0].add_(1e-4),
    "another statistic": lambda given: given["model"].features[1].running_mean.add_(1e-3),
    "another draw": lambda given: torch.rand(1),
    "a leftover hook": lambda given: given["model"].head.register_forward_hook(lambda *_: None),
    "a leftover forward": lambda given: setattr(given["model"], "forward", given["model"].forward),
    "a leftover class": lambda given: setattr(given["model"].head, "__class__", type("Linear", (nn.Linear,), {})),
    "a leftover option": lambda given: set_option(given, fused=True),
    "a leftover attribute of the loader": lambda given: setattr(given["loader"], "extra", 1),
    "a leftover layout": lambda given: given["model"].to(memory_format=torch.channels_last),
    "a leftover thread count": lambda given: torch.set_num_threads(torch.get_num_threads() + 1),
    "a leftover autocast": lambda given: torch.set_autocast_enabled("cpu", True),
}
#: A fault large enough to exceed the spread that is allowed for the default options.
BEYOND_SPREAD = {
    "another gradient": lambda given: given["model"].features[0].weight.register_hook(lambda gradient: 1.05 * gradient),
}


def set_option(arguments, **options):
    arguments["optimizer"].param_groups[0].update(options)


def rate_of(arguments):
    return arguments["optimizer"].param_groups[0]["lr"]


@contextlib.contextmanager
def thread_count_and_autocast_kept():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_autocast_enabled("cpu", False)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        *(pytest.param(EXACT, fault, id=f"exact, {name}") for name, fault in FAULTS.items()),
        *(pytest.param(SHIPPED, fault, id=f"as shipped, {name}") for name, fault in BEYOND_SPREAD.items()),
    ],
)
def test_a_planted_fault_is_found(monkeypatch, config, fault):
    """The 'acceleration' is the loop by hand after a planted fault, so the fault is the only difference."""

    def accelerated_with_a_fault(loop, arguments, options):
        fault(arguments)
        return loop(**arguments, by_hand=written_by_hand(config))

    monkeypatch.setattr(pairs, "accelerated_by_decorator", accelerated_with_a_fault)
    with thread_count_and_autocast_kept(), pytest.raises(AssertionError):
        check(job(model=ConvNet, loader=images), fit, config)


def test_a_swallowed_exception_is_found(monkeypatch):
    def swallowing(loop, arguments, options):
        with contextlib.suppress(pairs.FinishedError):
            return loop(**arguments)

    monkeypatch.setattr(pairs, "accelerated_by_setup", swallowing)
    with pytest.raises(AssertionError, match="swallowed"):
        check(job(), fit, FUSED)


@pytest.mark.parametrize("config", [BF16, NHWC], ids=lambda c: c.name)
def test_what_is_written_by_hand_changes_the_numbers(config):
    """Otherwise the comparison with it would say nothing about the acceleration."""
    build = job(model=ConvNet, loader=images, optimizer=ADAM)
    plain = run_plain(build, fit)
    by_hand = run_plain(build, fit, written_by_hand(config), config.channels_last)
    assert [*differences(by_hand["seen"], plain["seen"])]


def test_differences_are_found_in_values_of_every_kind():
    nested = (torch.zeros(1), {"x": True})
    value = {"tensor": torch.ones(2), "list": [1, 2.0, "three"], "none": None, "nested": nested}
    assert not [*differences(copy.deepcopy(value), value)]
    others = [
        {**value, "tensor": torch.tensor([1.0, 1.0000001])},
        {**value, "tensor": torch.ones(2, dtype=torch.float64)},
        {**value, "tensor": torch.ones(2, 1)},
        {**value, "list": [1, 2.0000001, "three"]},
        {**value, "list": (1, 2.0, "three")},
        {**value, "nested": (torch.zeros(1), {"x": False})},
        {**value, "more": 1},
        {**value, "tensor": torch.tensor([1.0, float("nan")])},
    ]
    assert [len([*differences(other, value)]) for other in others] == [1] * len(others)


def test_a_tolerance_is_relative_to_the_largest_value():
    expected = torch.tensor([100.0, 0.001])
    assert not [*differences(torch.tensor([100.0005, 0.0015]), expected, 1e-5)]
    assert [*differences(torch.tensor([100.005, 0.001]), expected, 1e-5)]
