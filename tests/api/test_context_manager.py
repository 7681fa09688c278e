"""accelerated(): a loop in the body of a with statement."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from watched import Net, in_bf16, is_fused

import nano_loop
from nano_loop import NanoConfigError, NanoError, accelerated, nano
from nano_loop.config.declarations import OPTIONS
from nano_loop.cpu import read_machine


def job():
    torch.manual_seed(0)
    net = Net()
    loader = DataLoader(TensorDataset(torch.randn(12, 3), torch.randn(12, 2)), batch_size=4, shuffle=True)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1), loader


def loop(model, optimizer, loader):
    torch.manual_seed(1)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("precision", [32, "bf16"])
def test_loop_computes_what_the_decorated_one_does(precision):
    options = {"precision": precision, "verbose": False}
    expected = nano(**options)(loop)(*job())
    parts = job()
    with accelerated(*parts, **options) as run:
        actual = loop(*parts)
    assert all(map(torch.equal, actual, expected))
    assert "fused_optimizer" in run.report.applied
    assert "fast_fetch" in run.report.applied


def test_what_is_made_in_the_body_is_set_up_by_the_run():
    with accelerated(precision="bf16", verbose=False) as run:
        assert run.report is None
        net, optimizer, loader = job()
        assert run.setup(net, optimizer, loader) == (net, optimizer, loader)
        assert in_bf16(net) == [True]
    with pytest.raises(NanoError, match="outside a run"):
        run.setup(net, optimizer)


def test_several_models_and_optimizers():
    nets = [Net(), Net()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with accelerated(nets, optimizers, precision="bf16", verbose=False):
        assert in_bf16(*nets) == [True, True]
        assert all(map(is_fused, optimizers))


def test_several_processes_are_refused_with_the_way_that_works():
    with pytest.raises(
        NanoConfigError, match=r"^num_processes=2: accelerated runs in one process. .*@nano_loop.nano\("
    ):
        accelerated(num_processes=2)


def test_wrong_arguments_are_errors_where_they_stand():
    with pytest.raises(NanoConfigError, match="Write precision"):
        accelerated(Net(), precison="bf16")
    with (
        pytest.raises(NanoConfigError, match=r"model is a builtins\.str"),
        accelerated("model", verbose=False),
    ):
        pass


def test_under_torchrun_each_process_runs_for_itself(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with accelerated(*job(), verbose=False) as run:
        assert run.ranks.size == 1
    assert "gradient_averaging" not in run.report.applied


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
def test_processes_of_torchrun_divide_the_threads_of_their_host(monkeypatch, variables, divided_by):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # which would stay in force
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(64)
    try:
        with accelerated(nn.Linear(1, 1), verbose=False):
            found = torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
    assert found == max(1, read_machine().num_threads // divided_by)
