"""Warnings name the line of the user's code, past all lines of nano_loop and torch."""

import inspect
from pathlib import Path

import pytest
import torch

import nano_loop
from nano_loop.errors import NanoWarning
from nano_loop.patching.user_code import is_running, users_place, warn


def test_line_is_the_users_through_torch():
    places = []
    value = torch.ones(1, requires_grad=True)
    value.register_hook(lambda gradient: places.append(users_place()))
    value.sum().backward()
    assert places[0].filename == __file__
    assert "places.append" in places[0].text


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
    place = users_place()
    with pytest.warns(NanoWarning) as caught:
        warn("of an earlier line", place)
    assert caught[0].lineno == place.number


def test_function_runs_until_it_returns():
    def function():
        return is_running(function.__code__)

    assert function()
    assert not is_running(function.__code__)
