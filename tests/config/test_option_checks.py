"""Each check accepts some values, normalizes them, and rejects others."""

import inspect

import pytest
import torch
from option_values import ALLOWED, REFUSED, SPELLINGS, TEXTS, cases

from nano_loop.config import option_checks as checks


def short(each):
    """Return the same name in every process, without an address: pytest's workers have to agree on test names."""
    return each.__name__ if inspect.isfunction(each) else repr(each).partition(" at 0x")[0][:30]


@pytest.mark.parametrize(("check", "case"), cases(SPELLINGS), ids=short)
def test_value_is_put_into_its_one_spelling_which_is_a_value_too(check, case):
    value, expected = case
    found = check(value)
    assert found == check(expected) == expected
    assert type(found) is type(expected)


def test_tables_have_every_check():
    no_checks = {"contradictions"}
    found = {
        function
        for name, function in vars(checks).items()
        if inspect.isfunction(function) and function.__module__ == checks.__name__ and not name.startswith("_")
    }
    found = {function for function in found if function.__name__ not in no_checks}
    for table in (SPELLINGS, REFUSED, ALLOWED, TEXTS):
        assert set(table) == found


def test_every_backend_of_this_torch_is_let_through():
    names = torch.distributed.Backend.backend_list
    usable = [
        name
        for name in names
        if name not in ("undefined", "nano_loop") and torch.distributed.is_backend_available(name)
    ]
    assert "gloo" in usable
    for name in usable:
        checks.process_group_backend(name)


def test_arguments_of_a_caller_are_copied():
    arguments = {"mode": "max-autotune"}
    found = checks.compile_arguments(arguments)
    arguments["mode"] = "default"
    assert found == {"mode": "max-autotune"}
