"""Ray starts the ranks, on one or two nodes; the results equal those of nano_loop's own workers.

Two nodes of a test's cluster share this host, so their ranks share memory. With `apart`, ranks of the second node
appear to be on another host, and gloo connects them.
"""

import ctypes
import os
import sys
import time
import warnings

import cloudpickle
import pytest
import torch
from distributed import small
from distributed.split_batches.loops import Plain, Shared, needs_kernels, trained
from distributed.split_batches.test_loops import assert_equal

import nano_loop
from clusters.nodes import OPTIONS, apart, on_ray, processes_of
from nano_loop import NanoConfigError, TorchNano, nano

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("connected", "nothing_left_on_the_cluster")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Mine:
    """An object of the script that is sent between hosts."""

    def __init__(self, value):
        self.value = value


def fit(model, optimizer, loader):
    steps = small.fit(model, optimizer, loader)
    own = [nano_loop.global_rank(), nano_loop.local_rank(), torch.get_num_threads()]
    with open("written by every rank", "w") as file:
        file.write(str(own))
    os.mkdir("made by every rank")
    if nano_loop.global_rank():  # compiled code may not change the caller's files
        assert ctypes.CDLL(None).open(b"written by every rank", os.O_WRONLY | os.O_CREAT, 0o600) == -1
    values = [nano_loop.broadcast(Mine(own), rank).value for rank in range(nano_loop.world_size())]
    return steps, values, nano_loop.all_gather(small.weights(model))


def expected(count):
    """Return the result of one process with batches of `count` times the size."""
    model, optimizer, loader = small.parts(batch_size=4 * count)
    small.fit(model, optimizer, loader)
    return small.weights(model)


def test_two_ranks_of_one_node_compute_what_subprocesses_do_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (steps, ranks, everywhere), weights = on_ray(fit, num_processes=2)
    model, optimizer, loader = small.parts()
    assert nano(num_processes=2, auto_lr=False, verbose=False)(small.fit)(model, optimizer, loader) == steps
    assert weights.equal(small.weights(model))
    assert ranks == [[0, 0, 1], [1, 1, 1]]
    assert all(each.equal(weights) for each in everywhere)
    assert (tmp_path / "written by every rank").read_text() == "[0, 0, 1]"  # rank 1's is in its private folder


@pytest.mark.parametrize("hosts", [1, 2])
def test_three_ranks_of_two_nodes_compute_what_one_process_of_three_batches_does(tmp_path, monkeypatch, hosts):
    monkeypatch.chdir(tmp_path)
    (_, ranks, everywhere), weights = on_ray(fit, worker_init=apart if hosts == 2 else None)
    # 32 samples make 8 batches, so the last group of three is filled up.
    assert [local for _, local, _ in ranks] == ([0, 1, 0] if hosts == 2 else [0, 1, 2])
    assert all(each.equal(weights) for each in everywhere)
    model, optimizer, loader = small.parts(samples=36)
    x = loader.dataset.tensors[0][:32]
    filled = torch.utils.data.TensorDataset(*(torch.cat([t, t[:4]]) for t in (x, x.sum(1, keepdim=True))))
    small.fit(model, optimizer, torch.utils.data.DataLoader(filled, 12))
    torch.testing.assert_close(weights, small.weights(model), rtol=1e-6, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_that_share_each_batch_compute_what_one_process_computes(hosts):
    names = ["sgd", "adam", "lbfgs", "accumulation", "padding", "dropout"]
    run = Shared(**OPTIONS, split_batches=True, worker_init=apart if hosts == 2 else None)
    assert_equal(run.train(names), trained(Plain(), names))
    assert run.report["loaders"].status == "applied"
    assert "not compared" in run.report["split_batches"].detail


def test_large_arguments_are_mapped_once_on_each_node():
    data = torch.arange(1 << 20, dtype=torch.float32)

    def look(model, optimizer, loader):
        small.fit(model, optimizer, loader)
        with open("/proc/self/maps") as rows:
            mapped = [row.split()[5] for row in rows if "/sent/" in row or "/payload/" in row]
        data[nano_loop.global_rank()] = -1.0  # copied on write: other ranks do not see it
        nano_loop.barrier()
        found = float(data.sum()), sorted({path.split("/")[3] for path in mapped if path})
        return [nano_loop.broadcast(found, rank) for rank in range(nano_loop.world_size())]

    found, _ = on_ray(look, worker_init=apart)
    total = float(data.double().sum())
    assert [abs(each - total + rank) < total * 1e-6 for rank, (each, _) in enumerate(found)] == [True] * 3
    assert [len(folders) for _, folders in found] == [0, 1, 1]
    assert found[1][1] != found[2][1]  # rank 1 shares the caller's node; rank 2 has its own node's copy


def test_torch_nano_runs_on_ray_and_one_step_gives_a_quarter():
    class Step(TorchNano):
        def train(self):
            model = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.constant_(model.weight, 0.5)
            model, optimizer = self.setup(model, torch.optim.SGD(model.parameters(), lr=0.25))
            self.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            return model.weight.item(), self.world_size, self.local_rank

    assert Step(**OPTIONS | {"num_processes": 2}).train() == (0.25, 2, 0)


def test_output_and_warnings_of_ranks_are_shown_with_the_rank(capfd):
    def speak(model, optimizer, loader):
        small.fit(model, optimizer, loader)
        if nano_loop.global_rank() == 1:
            print("on standard output")
            warnings.warn("of rank 1 alone", UserWarning, stacklevel=1)
        return 5

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert on_ray(speak, num_processes=2)[0] == 5
    out, err = capfd.readouterr()
    deadline = time.monotonic() + 20  # Ray shows a process's output a moment later
    while "of rank 1 alone" not in err and time.monotonic() < deadline:
        time.sleep(0.1)
        out, err = map("".join, zip((out, err), capfd.readouterr(), strict=True))
    (line,) = [line for line in err.splitlines() if "UserWarning: of rank 1 alone" in line]
    assert "(rank 1 pid=" in line
    assert "on standard output" not in out + err


def test_number_of_cpus_decides_on_how_many_nodes_the_ranks_are():
    def where(model, optimizer, loader):
        small.fit(model, optimizer, loader)
        return nano_loop.all_gather(torch.tensor(torch.get_num_threads())).tolist()

    with pytest.raises(NanoConfigError, match=r"2 ranks of 2 CPUs must fit, rank 0 on this node, .* 2 CPUs on .*, 1 C"):
        on_ray(where, num_processes=2, cpu_for_each_process=2)
    assert on_ray(where, num_processes=2, cpu_for_each_process=1)[0] == [1, 1]


def test_ray_is_not_imported_before_a_run_needs_it():
    code = "import sys, nano_loop; nano_loop.nano(verbose=False)(lambda model: model); sys.exit('ray' in sys.modules)"
    assert processes_of([sys.executable, "-c", code]) == (0, "", "")


def test_environment_is_the_caller_s_after_a_run_that_has_started_ray(tmp_path):
    """A run without `ray.init` starts a cluster, and leaves no file in the home folder."""
    program = """
import faulthandler, os, signal, sys
from nano_loop import nano
from distributed import small
from distributed.split_batches.loops import Plain, Shared, needs_kernels, trained
from distributed.split_batches.test_loops import assert_equal
import torch._dynamo  # which sets a variable
def state():
    hooks = {"hook": sys.excepthook, "handler": signal.getsignal(signal.SIGTERM), "faults": faulthandler.is_enabled()}
    return {**os.environ, **hooks}
before = state()
for _ in range(2):
    model, optimizer, loader = small.parts()
    train = nano(num_processes=2, distributed_backend="ray", auto_lr=False, verbose=False)(small.fit)
    train(model, optimizer, loader)
    assert before.items() == state().items(), before.items() ^ state().items()
    import ray
    assert not ray.is_initialized()
print(small.weights(model).tolist())
"""
    changed = {"HOME": str(tmp_path), "RAY_AUTH_MODE": None, "RAY_ADDRESS": "local"}
    code, out, err = processes_of([sys.executable, "-c", program], **changed)
    assert code == 0, err
    model, optimizer, loader = small.parts()
    nano(num_processes=2, auto_lr=False, verbose=False)(small.fit)(model, optimizer, loader)
    assert out.splitlines()[-1] == str(small.weights(model).tolist())
    assert os.listdir(tmp_path) == []
