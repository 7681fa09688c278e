"""Pairs of training runs: a team with each rank on its share of the batch, and one process on the whole batch."""

from contextlib import nullcontext

import torch

from nano_loop.config.options import Options
from nano_loop.cpu import LogicalCpu, Machine
from nano_loop.distributed.comm.ranks import ALONE
from nano_loop.distributed.data_parallel.averaging import Averaging
from nano_loop.patching.calls.calls import CallInterceptors
from nano_loop.steps.step import StepContext

MACHINE = Machine("A CPU", "x86_64", (LogicalCpu(id=0, physical_core=0),), (0,))


class PlainTransport:
    """A plain collective as the transport, to tell faults of the averaging from faults of a real transport."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.counts = []  # number of tensors in each averaging

    def average(self, tensors):
        self.counts.append(len(tensors))
        for tensor in tensors:
            tensor.copy_(self.ranks.mean(tensor))

    def leave(self):
        pass

    def close(self):
        pass


class Setup:
    """Passed to a loop instead of `TorchNano`: ``setup`` enables averaging, and ``share`` splits a batch."""

    def __init__(self, ranks, **settings):
        self.ranks = ranks
        self.rank = ranks.rank
        self.transport = PlainTransport(ranks)
        self.averaging = Averaging(ranks, self.transport, **settings) if ranks.size > 1 else None
        self.interceptors = CallInterceptors()

    def setup(self, model, *optimizers):
        if self.averaging is not None:
            self.averaging.add([model], list(optimizers))
            self.interceptors.add(model, "averaging", self.averaging.around_call)

    def share(self, batch):
        return batch.chunk(self.ranks.size)[self.rank]

    def paused(self, *models):
        return self.averaging.paused(models) if self.averaging is not None else nullcontext()

    def close(self):
        self.interceptors.close()
        if self.averaging is not None:
            self.averaging.close()


def make_step(kind, ranks, **options):
    """Make a step as the pipeline does, and return it with its interceptors."""
    interceptors = CallInterceptors()
    return kind(StepContext(Options(**options), MACHINE, interceptors, ranks)), interceptors


def trained(ranks, loop, *args):
    """Run ``loop(setup, *args)`` on one rank, with the same seed on all ranks, and return its detached result."""
    torch.manual_seed(0)
    setup = Setup(ranks)
    try:
        return plain(loop(setup, *args))
    finally:
        setup.close()


def plain(value):
    """Detach the tensors of models, optimizers, dicts and lists."""
    if isinstance(value, torch.nn.Module):
        return plain(value.state_dict())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def assert_pair(team, loop, *args, tolerance=1e-6):
    """Assert that all ranks of `team` end with the same bits, and match one process that trains on whole batches."""
    alone = trained(ALONE, loop, *args)
    first, *others = team(trained, loop, *args)
    for other in others:
        assert_close(other, first, 0)
    assert_close(first, alone, tolerance)


def assert_close(actual, expected, tolerance):
    """Compare plain values; tensors may differ by `tolerance` times the largest element."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        actual, expected = list(actual.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other, tolerance)
    elif isinstance(expected, torch.Tensor):
        one, other = (each.to_dense() if each.is_sparse else each for each in (actual, expected))
        assert one.shape == other.shape
        largest = float(other.abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * largest)
    elif isinstance(expected, float):
        assert abs(actual - expected) <= tolerance * abs(expected)
    else:
        assert actual == expected
