"""Training scripts in the style of public ones compute the same plain, accelerated, and with two processes.

Each is run as a program without changes. The plain run removes `nano` and `TorchNano`; other runs set options through
the environment. The trained result is stored in RESULT. With two processes, each rank has half of the plain run's
batch.
"""

import runpy
from pathlib import Path

import pytest
import torch
from distributed import small

import nano_loop
from scripts import data
from scripts.data import WHOLE_BATCH

SCRIPTS = pytest.mark.parametrize("script", ["built_in_main", "over_globals"])


class Plain:
    """Replaces `TorchNano` in a plain run: set-up has no effect."""

    is_global_zero = True
    print = staticmethod(print)

    def setup(self, model, optimizer, *loaders):
        return model, optimizer, [*loaders] if len(loaders) > 1 else loaders[0]

    def all_reduce(self, data):
        return data


def run(monkeypatch, script, *, batch=WHOLE_BATCH, **options):
    """Run a script and return its RESULT; without options, it runs without nano_loop."""
    with monkeypatch.context() as patch:
        if not options:
            patch.setattr(nano_loop, "nano", lambda function: function)
            patch.setattr(nano_loop, "TorchNano", Plain)
        for name, value in ({"VERBOSE": "False"} | options).items():
            patch.setenv(f"NANO_LOOP_{name}", value)
        patch.setattr(data, "BATCH", batch)
        return runpy.run_path(str(Path(__file__).parent / f"{script}.py"), run_name="__main__")["RESULT"]


@SCRIPTS
def test_script_computes_the_same_with_one_process(monkeypatch, script):
    plain = run(monkeypatch, script)
    torch.testing.assert_close(run(monkeypatch, script, EXACT="True"), plain, rtol=0, atol=0)
    torch.testing.assert_close(run(monkeypatch, script, NUM_PROCESSES="1"), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@SCRIPTS
def test_script_computes_the_same_with_two_processes(monkeypatch, script):
    plain = run(monkeypatch, script)
    cores = {"CPU_FOR_EACH_PROCESS": str(small.OPTIONS["cpu_for_each_process"])} if small.cores() else {}
    two = {"NUM_PROCESSES": "2", "AUTO_LR": "False", "TIMEOUT": "60", **cores}
    found = run(monkeypatch, script, batch=WHOLE_BATCH // 2, **two)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
