"""The examples in docstrings run, and return what they show."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import nano_loop

# Without those that import Lightning or Ray, which change the process.
IMPORT_RAY = ("cluster", "placement")
OF_RAY = {f"nano_loop.distributed.launch_ray.{each}" for each in IMPORT_RAY}
NAMES = {each.name for each in pkgutil.walk_packages(nano_loop.__path__, "nano_loop.")}
MODULES = sorted(NAMES - {"nano_loop.lightning", "nano_loop.pytorch_lightning"} - OF_RAY)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module)
    assert not failed
    lines = inspect.getsource(module).splitlines()
    assert bool(tried) == any(">>> " in line and "+SKIP" not in line for line in lines)
