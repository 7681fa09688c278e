"""Warnings name the line of the user's code, not lines of nano_loop or torch."""

import contextlib
import inspect
import linecache
import pathlib
import traceback
from pathlib import Path

import numpy
import pytest
import torch

import nano_loop
from nano_loop.errors import NanoWarning
from nano_loop.patching.user_code import trim_tracebacks, users_place, users_traceback, warn


def test_line_is_the_users_through_torch():
    places = []
    value = torch.ones(1, requires_grad=True)
    value.register_hook(lambda gradient: places.append(users_place()))
    value.sum().backward()
    assert places[0].filename == __file__
    assert "places.append" in linecache.getline(__file__, places[0].number)


def test_nano_loops_own_lines_are_passed_over():
    source = "from nano_loop.patching.user_code import users_place\ndef look(): return users_place()"
    names = {}
    exec(compile(source, str(Path(nano_loop.__file__).parent / "made_for_this_test.py"), "exec"), names)
    place = names["look"]()
    assert (place.filename, place.number) == (__file__, inspect.currentframe().f_lineno - 1)


def test_warning_has_the_users_line_and_is_shown_once_by_default():
    with pytest.warns(NanoWarning, match="a message") as caught:
        warn("a message")
    assert Path(caught[0].filename) == Path(__file__)


def fail_through(*files):
    """Raise in the last of a chain of functions, one per file; return the files in the traceback."""
    call = "raise ZeroDivisionError"
    for number, file in enumerate(reversed(files)):
        names = {"call": None if number == 0 else function}  # noqa: F821 - from the previous iteration
        exec(compile(f"def function():\n    {call}", file, "exec"), names)
        function, call = names["function"], "call()"
    try:
        function()
    except ZeroDivisionError as error:
        kept = users_traceback(error.__traceback__)
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(kept)][1:]  # without this function


def test_errors_that_have_led_to_another_are_trimmed_too():
    first, second, third = (ZeroDivisionError(number) for number in range(3))
    names = {"errors": [first, second, third]}
    code = "def fail(number):\n    if number: pass\n    raise errors[number]"
    exec(compile(code, "user.py", "exec"), names)
    exec(compile("def through(number):\n    fail(number)", OURS, "exec"), names)
    for error, number in ((first, 0), (second, 1), (third, 2)):
        with contextlib.suppress(ZeroDivisionError):
            names["through"](number)
        error.__traceback__ = error.__traceback__.tb_next
    second.__cause__, third.__context__, first.__context__ = first, second, third
    trim_tracebacks(third)
    for error in (first, second, third):
        assert [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)] == ["user.py"]


OURS, TORCH = str(Path(nano_loop.__file__).parent / "x.py"), str(Path(torch.__file__).parent / "x.py")
LINEAR = str(Path(torch.__file__).parent / "nn/modules/linear.py")


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        ([OURS, OURS, "user.py"], ["user.py"]),
        (["user.py", OURS, contextlib.__file__, OURS, "model.py", TORCH], ["user.py", "model.py", TORCH]),
        (["user.py", OURS, *[contextlib.__file__] * 3, "model.py"], ["user.py", "model.py"]),
        (["user.py", OURS, LINEAR, TORCH], ["user.py", LINEAR, TORCH]),
        (["user.py", contextlib.__file__, "model.py"], ["user.py", contextlib.__file__, "model.py"]),
        (["user.py", OURS, OURS], ["user.py", OURS, OURS]),  # an error of nano_loop's own
        (["user.py", OURS, LINEAR, OURS, TORCH], ["user.py", LINEAR, OURS, TORCH]),  # in one of its kernels
        (["user.py", OURS, pathlib.__file__], ["user.py", OURS, pathlib.__file__]),
        (["user.py", OURS, numpy.__file__], ["user.py", OURS, numpy.__file__]),
        (["user.py", OURS, "model.py", pathlib.__file__], ["user.py", "model.py", pathlib.__file__]),
    ],
)
def test_traceback_leads_through_the_user_s_code_and_to_where_it_was_raised(files, kept):
    assert fail_through(*files) == kept


def test_error_of_a_model_has_the_frames_that_it_has_without_nano_loop():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x)

    def train(model):
        model(torch.rand(2, 5))

    counts = []
    for function in (train, nano_loop.nano(precision="bf16", verbose=False)(train)):
        with pytest.raises(RuntimeError, match="mat1") as caught:
            function(Net())
        counts.append(len([*traceback.walk_tb(caught.value.__traceback__)]))
    assert counts[1] <= counts[0] + 2  # the decorated function, and its caller


def test_refusal_has_no_frames_of_nano_loop_but_those_of_the_call():
    @nano_loop.nano(num_processes=4096, verbose=False)
    def train(model):
        raise AssertionError

    with pytest.raises(nano_loop.NanoConfigError, match="physical cores") as caught:
        train(torch.nn.Linear(1, 1))
    assert len([*traceback.walk_tb(caught.value.__traceback__)]) <= 4
