"""The harness itself: it finds each fault that is planted in an accelerated loop."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from . import pairs
from .nested import differences, mapped
from .pairs import BF16, EXACT, FUSED, NHWC, SHIPPED, check, run_plain, untouched, written_by_hand
from .tasks import ADAM, ConvNet, fit, images, job


def loop(model, optimizer, loader, by_hand=untouched):
    return fit(model, optimizer, loader, by_hand)


def another_rate(arguments):
    arguments["optimizer"].param_groups[0]["lr"] *= 1.001


def another_rate_by_far(arguments):
    arguments["optimizer"].param_groups[0]["lr"] *= 1.05


def another_gradient(arguments):
    """One kernel's gradient is off by 5%."""
    arguments["model"].features[0].weight.register_hook(lambda gradient: 1.05 * gradient)


def another_weight(arguments):
    with torch.no_grad():
        arguments["model"].head.bias[0] += 1e-4


def another_statistic(arguments):
    next(m for m in arguments["model"].modules() if hasattr(m, "running_mean")).running_mean.add_(1e-3)


def another_draw(arguments):
    torch.rand(1)


def a_leftover_hook(arguments):
    arguments["model"].head.register_forward_hook(lambda *_: None)


def a_leftover_forward(arguments):
    arguments["model"].forward = arguments["model"].forward


def a_leftover_class(arguments):
    arguments["model"].head.__class__ = type("Linear", (nn.Linear,), {})


def a_leftover_option(arguments):
    arguments["optimizer"].param_groups[0]["fused"] = True


def a_leftover_attribute_of_the_loader(arguments):
    arguments["loader"].extra = 1


def a_leftover_layout(arguments):
    arguments["model"].to(memory_format=torch.channels_last)


def a_leftover_thread_count(arguments):
    torch.set_num_threads(torch.get_num_threads() + 1)


def a_leftover_autocast(arguments):
    torch.set_autocast_enabled("cpu", True)


FAULTS = [another_rate, another_weight, another_statistic, another_draw, a_leftover_hook, a_leftover_forward]
FAULTS += [a_leftover_class, a_leftover_option, a_leftover_attribute_of_the_loader, a_leftover_layout]
FAULTS += [a_leftover_thread_count, a_leftover_autocast]


@contextlib.contextmanager
def thread_count_and_autocast_kept():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_autocast_enabled("cpu", False)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(monkeypatch, fault):
    """The 'acceleration' is the plain loop with a fault before it, so the fault is all there is to find."""

    def accelerated_with_a_fault(loop, arguments, options):
        fault(arguments)
        return loop(**arguments)

    monkeypatch.setattr(pairs, "accelerated_by_decorator", accelerated_with_a_fault)
    with thread_count_and_autocast_kept(), pytest.raises(AssertionError):
        check(job(model=ConvNet, loader=images), loop, EXACT)


@pytest.mark.parametrize("fault", [another_rate_by_far, another_gradient, another_draw, a_leftover_layout])
def test_a_planted_fault_is_found_beyond_bf16s_own_spread(monkeypatch, fault):
    """What the options do as they are shipped is held by the spread of the loop by hand."""

    def accelerated_with_a_fault(loop, arguments, options):
        fault(arguments)
        return loop(**arguments, by_hand=written_by_hand(SHIPPED))

    monkeypatch.setattr(pairs, "accelerated_by_decorator", accelerated_with_a_fault)
    with pytest.raises(AssertionError):
        check(job(model=ConvNet, loader=images), loop, SHIPPED)


def test_no_fault_is_found_where_none_is(monkeypatch):
    monkeypatch.setattr(pairs, "accelerated_by_decorator", lambda loop, arguments, options: loop(**arguments))
    check(job(model=ConvNet, loader=images), loop, EXACT)


def test_a_swallowed_exception_is_found(monkeypatch):
    def swallowing(loop, arguments, options):
        with contextlib.suppress(pairs.FinishedError):
            return loop(**arguments)

    monkeypatch.setattr(pairs, "accelerated_by_setup", swallowing)
    with pytest.raises(AssertionError, match="swallowed"):
        check(job(), loop, FUSED)


@pytest.mark.parametrize("config", [BF16, NHWC], ids=lambda c: c.name)
def test_what_is_written_by_hand_changes_the_numbers(config):
    """Else the comparison with it would say nothing about the acceleration."""
    build = job(model=ConvNet, loader=images, optimizer=ADAM)
    plain = run_plain(build, loop)
    by_hand = run_plain(build, loop, written_by_hand(config), config.channels_last)
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


def test_mapped_keeps_what_is_no_tensor():
    value = [torch.zeros(1), ({"a": torch.zeros(1)}, "text", None)]
    assert mapped(value, lambda t: t + 1) == [torch.ones(1), ({"a": torch.ones(1)}, "text", None)]
