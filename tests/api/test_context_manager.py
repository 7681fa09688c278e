"""accelerated(): a loop in the body of a with statement."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn
from watched import Net, in_bf16, make

import nano_loop
from nano_loop import NanoConfigError, NanoError, accelerated
from nano_loop.config.declarations import OPTIONS
from nano_loop.cpu import read_machine


def test_what_is_made_in_the_body_is_set_up_by_the_run():
    with accelerated(precision="bf16", verbose=False) as run:
        assert run.report is None
        net, optimizer, loader = make()
        assert run.setup(net, optimizer, loader) == (net, optimizer, loader)
        assert in_bf16(net) == [True]
        assert run.setup(net) is net
        assert repr(run).startswith("<nano_loop run: applied ")
    with pytest.raises(NanoError, match="outside a run"):
        run.setup(net, optimizer)


def test_several_processes_are_refused_with_the_way_that_works():
    with pytest.raises(
        NanoConfigError, match=r"^num_processes=2: accelerated runs in one process. .*@nano_loop.nano\("
    ):
        accelerated(num_processes=2)


def test_wrong_arguments_are_errors_where_they_stand():
    with pytest.raises(NanoConfigError, match="Write precision"):
        accelerated(Net(), precison="bf16")
    with (
        pytest.raises(NanoConfigError, match=r"model is a str: it must be a torch\.nn\.Module"),
        accelerated("model", verbose=False),
    ):
        pass


def test_options_are_those_of_nano_by_keyword():
    parameters = inspect.signature(nano_loop.accelerated).parameters
    options = [name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY]
    assert options == list(OPTIONS)


@pytest.mark.parametrize(
    ("variables", "divided_by"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 2),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, 1),  # srun binds its processes
        ({}, 1),
    ],
)
def test_processes_of_torchrun_are_runs_that_divide_the_threads_of_their_host(monkeypatch, variables, divided_by):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # they would stay in effect
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(64)
    try:
        with accelerated(nn.Linear(1, 1), verbose=False) as run:
            found = torch.get_num_threads()
            assert run.ranks.size == 1
    finally:
        torch.set_num_threads(threads)
    assert found == max(1, read_machine().num_threads // divided_by)


NEVER_LEFT = """
import torch
from nano_loop import accelerated
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
context = accelerated(model, optimizer, precision="bf16-true")
context.__enter__()
model(torch.randn(4, 64)).sum().backward()
optimizer.step()
"""


def test_run_that_the_program_never_leaves_ends_before_the_interpreter():
    done = subprocess.run([sys.executable, "-c", NEVER_LEFT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr  # torch aborts the process if weights change while it is torn down
