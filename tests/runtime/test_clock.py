"""A run's clock counts optimizer steps, reports each in order, and leaves nothing on the optimizers."""

import threading

import pytest
import torch
from torch import nn

from nano_loop.runtime.clock import StepClock


def made(kind=torch.optim.SGD, **options):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return kind([parameter], lr=0.1, **options)


@pytest.fixture
def clock():
    ticking = StepClock()
    yield ticking
    ticking.close()


@pytest.fixture
def told(clock):
    told = []
    clock.before(lambda optimizer, args, kwargs: told.append(("before", optimizer)))
    clock.after(lambda optimizer: told.append(("after", optimizer, clock.steps)))
    return told


def test_steps_of_all_optimizers_are_counted_and_told_until_it_is_closed(clock, told):
    one, two, other = made(), made(), made()
    clock.add([one, two])
    clock.add([one])  # set up again
    for optimizer in (one, two, other, one):
        optimizer.step()
    assert told == [
        *(("before", one), ("after", one, 1)),
        *(("before", two), ("after", two, 2)),
        *(("before", one), ("after", one, 3)),
    ]
    clock.close()
    one.step()
    assert (clock.steps, len(told)) == (3, 6)
    assert not one._optimizer_step_pre_hooks
    assert not one._optimizer_step_post_hooks


def test_hooks_of_the_user_before_the_setup_come_before_it_and_later_ones_after_it(clock):
    calls, optimizer = [], made()
    optimizer.register_step_pre_hook(lambda *_: calls.append("first"))
    optimizer.register_step_post_hook(lambda *_: calls.append("first, after"))
    clock.add([optimizer])
    optimizer.register_step_pre_hook(lambda *_: calls.append("last"))
    optimizer.register_step_post_hook(lambda *_: calls.append("last, after"))
    clock.before(lambda *_: calls.append("ours"))
    clock.after(lambda *_: calls.append("ours, after"))
    optimizer.step()
    assert calls == ["first", "ours", "last", "first, after", "ours, after", "last, after"]


def test_arguments_pass_from_one_function_to_the_next(clock):
    """Each function wraps the closure of the one before."""
    optimizer, calls = made(), []
    clock.add([optimizer])

    def wrapping(name):
        def before(optimizer, args, kwargs):
            closure = args[1]
            return (args[0], lambda: (calls.append(name), closure())[1]), kwargs

        return before

    clock.before(wrapping("inner"))
    clock.before(lambda *_: None)
    clock.before(wrapping("outer"))
    assert optimizer.step(lambda: 7) == 7
    assert calls == ["outer", "inner"]


def test_step_that_calls_that_of_its_base_ends_with_the_outer_one(clock):
    calls = []

    class Decaying(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            calls.append("the rest of it")
            super().step(closure)

    made()
    optimizer = made(Decaying)
    clock.add([optimizer])
    clock.after(lambda _: calls.append("after"))

    def fails():
        raise ArithmeticError

    optimizer.step()
    with pytest.raises(ArithmeticError):
        optimizer.step(fails)
    optimizer.step()
    assert calls == ["the rest of it", "after"] * 2
    assert clock.steps == 2


def test_step_that_raises_does_not_count_and_the_next_one_does(clock, told):
    optimizer = made()
    clock.add([optimizer])

    def fails():
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(fails)
    assert clock.steps == 0
    optimizer.step()
    assert [what for what, *_ in told] == ["before", "before", "after"]
    assert clock.steps == 1


def test_steps_of_other_threads_are_told_and_not_counted(clock, told):
    optimizer = made()
    clock.add([optimizer])
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    assert clock.steps == 0
    assert [what for what, *_ in told] == ["before", "after"]


def test_functions_are_called_in_so_many_steps_and_at_doublings_of_these(clock):
    optimizer, calls = made(), []
    clock.add([optimizer])
    optimizer.step()
    clock.in_steps(2, lambda: calls.append(("once", clock.steps - 1)))
    cancelled = clock.in_steps(2, lambda: calls.append("cancelled"))
    clock.at_doublings(lambda: calls.append(("from the first", clock.steps - 1)))
    stop = clock.at_doublings(lambda: calls.append(("from the third", clock.steps - 1)), first=3)
    cancelled()
    for step in range(12):
        if step == 8:
            stop()
        optimizer.step()
    assert calls == [
        ("from the first", 1),
        ("once", 2),
        ("from the first", 2),
        ("from the third", 3),
        ("from the first", 4),
        ("from the third", 6),
        ("from the first", 8),
    ]


def test_function_that_ends_its_subscription_leaves_the_others(clock):
    optimizer, calls = made(), []
    clock.add([optimizer])
    ending = clock.after(lambda _: (calls.append("first"), ending()))
    clock.after(lambda _: calls.append("second"))
    optimizer.step()
    optimizer.step()
    assert calls == ["first", "second", "second"]
