"""The examples in docstrings run, and give what they say."""

import doctest
import importlib
import pkgutil

import pytest

import nano_loop

MODULES = sorted(each.name for each in pkgutil.walk_packages(nano_loop.__path__, "nano_loop."))
WITH_EXAMPLES = ("nano_loop.accelerated", "nano_loop.decorator", "nano_loop.precision.autocast", "nano_loop.torch_nano")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert not failed
    assert bool(tried) == (name in WITH_EXAMPLES)
