"""The collectives for decorated functions work in several processes, in one, outside of runs, and in threads."""

import copy
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp

import nano_loop
from distributed import small
from nano_loop import TorchNano, is_global_zero, nano


def everything():
    rank = nano_loop.global_rank()
    reduced = nano_loop.all_reduce({"mean": torch.tensor([rank, 3.0]), "number": float(rank)})
    return {
        "place": (rank, nano_loop.local_rank(), nano_loop.world_size()),
        "zero": (is_global_zero(), bool(is_global_zero), nano_loop.is_global_zero()),
        "mean": [reduced["mean"].tolist(), float(reduced["number"])],
        "sum": nano_loop.all_reduce(torch.tensor([rank + 1]), reduce_op="sum").tolist(),
        "gathered": nano_loop.all_gather([torch.tensor([rank])])[0].tolist(),
        "broadcast": nano_loop.broadcast({"from": rank}, src=nano_loop.world_size() - 1),
        "barrier": nano_loop.barrier(),
    }


ALONE = {
    "place": (0, 0, 1),
    "zero": (True,) * 3,
    "mean": [[0.0, 3.0], 0.0],
    "sum": [1],
    "gathered": [0],
    "broadcast": {"from": 0},
    "barrier": None,
}


def test_outside_of_all_runs_and_in_one_process_they_give_one_s_own_values():
    assert everything() == ALONE
    assert nano(verbose=False)(lambda model: everything())(nn.Linear(1, 1)) == ALONE
    assert numbers() == [3_000_000_001, 3_000_000_000, 16777217.0, [-3, 5], 7]


def test_torch_nano_s_are_the_same():
    class Loop(TorchNano):
        def train(self):
            data = {"a": [torch.ones(2), 3], "b": 2.5, "c": np.arange(2), "d": np.int64(4)}
            mine = nano_loop.all_reduce(copy.deepcopy(data)), nano_loop.all_gather(copy.deepcopy(data))
            return mine, (self.all_reduce(copy.deepcopy(data)), self.all_gather(copy.deepcopy(data)))

    mine, its = Loop(verbose=False).train()
    assert str(mine) == str(its)
    assert all(isinstance(value, torch.Tensor) for value in (*mine[0]["a"], *list(mine[0].values())[1:]))


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (lambda: nano_loop.all_reduce(1 << 63), f"data={1 << 63}"),
        (lambda: nano_loop.all_gather([-(1 << 70)]), f"data={-(1 << 70)}"),
        (lambda: nano_loop.all_reduce("loss"), "data='loss'"),
        (lambda: nano_loop.all_reduce(1.0, "sum"), "group='sum'"),
        (lambda: nano_loop.all_gather(1.0, 0), "group=0"),
        (lambda: nano_loop.all_reduce(1.0, reduce_op="total"), "reduce_op='total'"),
        (lambda: nano_loop.all_reduce(1.0, reduce_op=None), "reduce_op=None"),
        (lambda: nano_loop.broadcast(1, src=5), "src=5"),
        (lambda: nano_loop.broadcast(1, src=-1), "src=-1"),
        (lambda: nano_loop.broadcast(1, src="0"), "src='0'"),
    ],
)
def test_arguments_that_no_ranks_can_take_are_refused_in_one_process_too(call, given):
    with pytest.raises(nano_loop.NanoConfigError) as caught:
        call()
    assert str(caught.value).startswith(f"{given}: ")


def numbers():
    """Return numbers that int32 and float32 cannot represent, and means of integers."""
    rank = nano_loop.global_rank()
    reduced = [
        nano_loop.all_reduce(3_000_000_001 + 2 * rank),
        nano_loop.all_reduce(3_000_000_000, reduce_op="sum"),
        nano_loop.all_reduce(16777217.0, reduce_op="AVG"),
        nano_loop.all_reduce(torch.tensor([-3 + rank, 5 - rank])),
        nano_loop.all_reduce(np.int64(7 + rank), reduce_op=ReduceOp.MAX),
    ]
    return [value.tolist() for value in reduced]


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def loss_s_gradient(reduce):
    weight = torch.tensor(3.0, requires_grad=True)
    loss = weight * 2
    if reduce:
        nano_loop.all_reduce(loss)
    loss.backward()
    return weight.grad.item()


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")  # called by Fabric for sync_grads
@pytest.mark.usefixtures("nothing_left")
def test_ranks_of_a_run_reach_each_other():
    inner = nano(num_processes=1, verbose=False)(lambda model: nano_loop.world_size())

    @nano(**small.OPTIONS)
    def train(model):
        other = in_a_thread(lambda: (nano_loop.global_rank(), is_global_zero()))
        assert numbers() == [3_000_000_002, 6_000_000_000, 16777217.0, [-2, 4], 8]
        found = everything(), other, inner(model), loss_s_gradient(reduce=True), loss_s_gradient(reduce=False)
        stacked = nano_loop.all_gather(weight := torch.ones(1, requires_grad=True), sync_grads=True)
        stacked.sum().backward()
        return [nano_loop.broadcast((*found, weight.grad.item()), rank) for rank in range(2)]

    ranks = train(nn.Linear(1, 1))
    for rank, (found, other, nested, reduced, plain, synced) in enumerate(ranks):
        assert found == {
            "place": (rank, rank, 2),
            "zero": (rank == 0,) * 3,
            "mean": [[0.5, 3.0], 0.5],
            "sum": [3],
            "gathered": [[0], [1]],
            "broadcast": {"from": 1},
            "barrier": None,
        }
        assert other == (rank, rank == 0), "a thread of the loop's asks for the ranks of its process"
        assert nested == 1, "a run of one process in each rank has its own ranks"
        assert reduced == plain == 2.0, "a mean for a log leaves the gradient alone"
        assert synced == 2.0
    assert everything() == ALONE


def test_is_global_zero_is_sent_and_copied_as_the_function_that_it_is():
    assert pickle.loads(pickle.dumps(is_global_zero)) is is_global_zero
    assert copy.deepcopy(is_global_zero) is is_global_zero
    assert "rank 0" in is_global_zero.__doc__


def test_among_processes_of_torchrun_the_place_is_known_outside_a_run_and_a_collective_is_refused():
    program = """
import nano_loop
print(nano_loop.global_rank(), nano_loop.world_size(), nano_loop.is_global_zero())
try:
    nano_loop.all_reduce(1.0)
except nano_loop.NanoError as error:
    print(error)
"""
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=environ)
    first, second = done.stdout.splitlines()
    assert first == "1 2 False"
    assert second.startswith("nano_loop.all_reduce outside a run, in one of 2 processes: the processes are connected")
