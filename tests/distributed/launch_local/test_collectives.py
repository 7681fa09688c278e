"""torch.distributed works as with gloo in a run on one host, without a socket that others could connect to."""

import os
import socket
import sys
import time
import warnings

import pytest
import torch
from torch import distributed, nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from distributed import small
from distributed.listeners import Watched
from nano_loop import NanoError, TorchNano, nano

pytestmark = pytest.mark.usefixtures("nothing_left")


def tensors(found):
    return [each.tolist() for each in found]


def reductions(rank):
    found = {}
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        found[name] = torch.tensor([1.0, 2.0]) + 3 * rank
        distributed.all_reduce(found[name], getattr(ReduceOp, name))
    for name in ("BAND", "BOR", "BXOR"):
        found[name] = torch.tensor([6, 5]) + rank
        distributed.all_reduce(found[name], getattr(ReduceOp, name))
    found["of 16 bits"] = torch.tensor([1.5], dtype=torch.bfloat16)
    distributed.all_reduce(found["of 16 bits"])
    found["complex"] = torch.tensor([1j * rank])
    distributed.all_reduce(found["complex"])
    found["columns"] = torch.arange(4.0).view(2, 2).t()
    distributed.all_reduce(found["columns"])
    sparse = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (4,), check_invariants=False)
    distributed.all_reduce(sparse)
    found["sparse"] = sparse.to_dense()
    found["reduced to 1"] = torch.ones(2) + rank
    distributed.reduce(found["reduced to 1"], 1)
    return {name: each.tolist() for name, each in found.items() if rank == 1 or name != "reduced to 1"}


REDUCED = {
    "SUM": [5, 7],
    "AVG": [2.5, 3.5],
    "PRODUCT": [4, 10],
    "MIN": [1, 2],
    "MAX": [4, 5],
    "BAND": [6, 4],
    "BOR": [7, 7],
    "BXOR": [1, 3],
    "of 16 bits": [3],
    "complex": [1j],
    "columns": [[0, 4], [2, 6]],
    "sparse": [1, 1, 4, 0],
    "reduced to 1": [3, 3],
}


def moved(rank):
    """Return the tensors and objects that arrive on this rank in an exchange."""
    mine, two = torch.full((2,), float(rank)), lambda: [torch.zeros(2), torch.zeros(2)]
    found = {"broadcast": torch.full((2, 3), float(rank)).t(), "all_gather": two(), "scatter": torch.zeros(2)}
    distributed.broadcast(found["broadcast"], 1)
    distributed.all_gather(found["all_gather"], mine)
    distributed.scatter(found["scatter"], [torch.ones(2), torch.ones(2) * 2] if rank == 0 else None, 0)
    found["gather"] = two() if rank == 1 else []
    distributed.gather(mine, found["gather"] or None, 1)
    found["all_to_all"] = [torch.zeros(1 + rank), torch.zeros(1 + rank)]
    distributed.all_to_all(found["all_to_all"], [mine[:1], mine])
    objects, one = [f"of {rank}"], [None]
    distributed.broadcast_object_list(objects, 1)
    distributed.scatter_object_list(one, ["a", "b"] if rank == 0 else None, 0)
    lists = {name: each.tolist() if isinstance(each, torch.Tensor) else tensors(each) for name, each in found.items()}
    return lists | {"objects": objects + one}


MOVED = [
    {
        "broadcast": [[1, 1]] * 3,
        "all_gather": [[0, 0], [1, 1]],
        "scatter": [rank + 1] * 2,
        "gather": [[0, 0], [1, 1]] if rank else [],
        "all_to_all": [[0] * (1 + rank), [1] * (1 + rank)],
        "objects": ["of 1", "ab"[rank]],
    }
    for rank in range(2)
]


def refused(rank):
    """Return the error messages of point-to-point calls, of rare collectives, and of a coalesced one."""
    value, told = torch.ones(2), []
    # Older versions of torch have only the second name.
    reduce_scatter_single = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    every = [distributed.P2POp(distributed.isend, value, 1 - rank)]
    for call, *args in (
        (distributed.reduce_scatter, value, [value, value]),
        (reduce_scatter_single, value, torch.ones(4)),
        (distributed.all_to_all_single, torch.ones(2), value),
        (distributed.isend, value, 1 - rank),
        (distributed.recv, value),
        (distributed.group.WORLD.allreduce_coalesced, [value, value]),
    ):
        with pytest.raises(NanoError) as error:
            call(*args)
        told.append(str(error.value))
    with pytest.raises(NanoError):
        distributed.batch_isend_irecv(every)
    return told


def groups(rank):
    both, one = distributed.new_group([1, 0]), distributed.new_group([1])
    found = torch.ones(1) * (rank + 1)
    distributed.all_reduce(found, group=both)
    if rank == 1:
        distributed.all_reduce(found, group=one)
    distributed.destroy_process_group(both)
    future = distributed.all_reduce(found, async_op=True).get_future()
    return future.wait()[0].item(), distributed.get_backend(), distributed.get_world_size()


def wrapped(rank):
    """Return the gradients of a user's `DistributedDataParallel`, and the mean of the gradients without it."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ddp = DistributedDataParallel(model)
    x = torch.rand(5, 3)
    ddp(x).pow(2).sum().backward()
    return [each.grad.clone() for each in model.parameters()], [each.detach() for each in model.parameters()]


def sampled(rank):
    loader = DataLoader(range(8), batch_size=2, sampler=DistributedSampler(range(8), shuffle=False))
    return [each.tolist() for each in loader]


def test_functions_of_torch_distributed_give_what_they_are_documented_to_give():
    def train(model):
        rank = distributed.get_rank()
        asked = (reductions, moved, refused, groups, sampled, wrapped)
        return small.everywhere({each.__name__: each(rank) for each in asked})

    first, second = nano(**small.OPTIONS)(train)(nn.Linear(1, 1))
    assert second["reductions"] == REDUCED
    assert first["reductions"] == {name: each for name, each in REDUCED.items() if name != "reduced to 1"}
    assert [first["moved"], second["moved"]] == MOVED
    (message,) = {*first["refused"], *second["refused"]}
    assert "a message to one rank, a reduce_scatter" in message
    assert "process_group_backend='gloo'" in message
    assert [first["groups"], second["groups"]] == [(6, "nano_loop", 2)] * 2
    assert [first["sampled"], second["sampled"]] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    for one, other in zip(*map(sum_of_lists, (first["wrapped"], second["wrapped"])), strict=True):
        assert one.equal(other)


def sum_of_lists(lists):
    return [each for some in lists for each in some]


class Loop(TorchNano):
    def __init__(self, power):
        super().__init__(**small.OPTIONS)
        self.power = power

    def train(self):
        model = nn.Linear(2, 1, bias=False)  # different weights on the ranks
        model.register_buffer("quantized", quantized(0.1 + self.global_rank))
        self.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        values = {"scale": model.quantized.q_scale(), "quantized": model.quantized.dequantize()}
        values["weights"] = small.weights(model)
        x = torch.full((1, 2), self.global_rank + 1.0)
        with self.no_backward_sync(model):
            model(x).sum().backward()
        values["alone"] = model.weight.grad.tolist()
        model(x).sum().backward()
        values["averaged"] = model.weight.grad.tolist()
        self.seen = self.broadcast(self.power * 10, src=1)
        with self.rank_zero_first():
            pass
        self.barrier()
        fabric = {
            "place": (self.global_rank, self.local_rank, self.world_size, self.is_global_zero, self.node_rank),
            "mean": self.all_reduce(torch.ones(2) * self.global_rank).tolist(),
            "sum": self.all_reduce(torch.tensor([1.0 + self.global_rank]), reduce_op="sum").tolist(),
            "gathered": self.all_gather(torch.tensor([self.global_rank])).tolist(),
            "from 1": self.broadcast({"a": self.global_rank}, 1),
        }
        return small.everywhere((values, fabric))


def test_fabric_s_collectives_and_attributes_and_quantized_buffers_reach_all_ranks():
    loop = Loop(power=3)
    before = loop.world_size, loop.global_rank
    ranks = loop.train()
    assert before == (loop.world_size, loop.global_rank) == (2, 0)
    assert loop.seen == 30, "set by rank 0"
    for rank, (values, fabric) in enumerate(ranks):
        assert values["scale"] == pytest.approx(0.1)
        assert values["quantized"].equal(quantized(0.1).dequantize())
        assert values["weights"].equal(ranks[0][0]["weights"]), "made inside of train"
        assert (values["alone"], values["averaged"]) == ([[rank + 1.0] * 2], [[3.0] * 2])
        place = rank, rank, 2, rank == 0, 0
        assert fabric == {"place": place, "mean": [0.5] * 2, "sum": [3.0], "gathered": [[0], [1]], "from 1": {"a": 1}}


def quantized(scale):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated by torch, but still used
        return torch.quantize_per_tensor(torch.tensor([0.3, 1.0]), scale, 2, torch.quint8)


def test_parameter_without_memory_is_refused_by_name_on_every_rank():
    class Loop(TorchNano):
        def train(self):
            model = nn.Linear(3, 1, device="meta")
            self.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), move_to_device=False)

    started = time.monotonic()
    with pytest.raises(NanoError, match=r"Linear.weight is on the device 'meta': .*\. Call model.to_empty"):
        Loop(**small.OPTIONS).train()
    assert time.monotonic() - started < 30  # without waiting for the timeout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sockets are looked up in /proc")
def test_ranks_of_one_host_have_no_socket_that_others_could_connect_to():
    def train(model, optimizer, loader):
        steps = small.fit(model, optimizer, loader)
        small.everywhere("values of the user's")
        time.sleep(0.5)  # time to look for sockets
        distributed.barrier()
        return steps

    with Watched() as found:
        assert nano(**small.OPTIONS)(train)(*small.parts()) == 8
    assert found.listened == set()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sockets are looked up in /proc")
def test_watch_for_sockets_sees_those_that_there_are():
    with (
        Watched() as found,
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_UNIX) as named,
    ):
        named.bind(f"\0nano_loop-test-{os.getpid()}")  # an abstract socket: no folder's permissions protect it
        named.listen()
        deadline = time.monotonic() + 30
        while len(found.listened) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sorted(kind for kind, _ in found.listened) == ["tcp", "unix"]
