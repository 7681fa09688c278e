"""The examples in docstrings run, and give what they say."""

import doctest
import importlib
import pkgutil

import pytest

import nano_loop

# Not those that import Lightning or Ray, which change the process.
IMPORT_RAY = ("cluster", "placement", "starting")
OF_RAY = {f"nano_loop.distributed.launch_ray.{each}" for each in IMPORT_RAY}
NAMES = {each.name for each in pkgutil.walk_packages(nano_loop.__path__, "nano_loop.")}
MODULES = sorted(NAMES - {"nano_loop.lightning", "nano_loop.pytorch_lightning"} - OF_RAY)
WITH_EXAMPLES = (
    *("nano_loop.api.context_manager", "nano_loop.api.decorator", "nano_loop.api.collectives", "nano_loop.optim"),
    *(
        "nano_loop.api.tuning_call",
        "nano_loop.precision.autocast.autocast",
        "nano_loop.precision.autocast.default_ops",
        "nano_loop.api.torch_nano",
        "nano_loop.api.verification",
    ),
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert not failed
    assert bool(tried) == (name in WITH_EXAMPLES)
