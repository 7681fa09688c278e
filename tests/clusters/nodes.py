"""Helpers for tests of a Ray cluster: run a loop on it, and treat nodes as hosts."""

import os
import subprocess
import sys

import cloudpickle
from distributed import small

from nano_loop import nano

OPTIONS = {"num_processes": 3, "distributed_backend": "ray", "auto_lr": False, "verbose": False, "timeout": 60}


def on_ray(function, **options):
    """Run a loop with the objects of `small`, and return its result and the weights."""
    model, optimizer, loader = small.parts()
    returned = nano(**OPTIONS | options)(function)(model, optimizer, loader)
    return returned, small.weights(model)


def apart():
    """Make this process, an actor, appear on another host, unless it is on the first node."""
    import ray

    from nano_loop.distributed.launch_external import launcher

    context = ray.get_runtime_context()
    first = next(each["NodeID"] for each in ray.nodes() if "node:__internal_head__" in each["Resources"])
    if context.get_node_id() != first:
        here = launcher.this_host()
        launcher.this_host = lambda: f"{context.get_node_id()} {here}"


def processes_of(command, **variables):
    """Run a program until it exits, and return its exit code, its output and its errors."""
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


cloudpickle.register_pickle_by_value(sys.modules[__name__])
