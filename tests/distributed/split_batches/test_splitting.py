"""Loaders of ranks that share each batch: order and length equal the plain loop's, and each sample is loaded once."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from distributed.data_parallel.averaged import make_step
from nano_loop import TorchNano
from nano_loop.distributed.comm.split_batches import SplitBatches
from nano_loop.errors import NanoError
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.sharding import Sharding


class Numbers(Dataset):
    def __init__(self):
        self.loaded = []

    def __len__(self):
        return 17

    def __getitem__(self, index):
        self.loaded.append(index)
        return torch.tensor(index)


def stacked(samples):
    return torch.stack(samples)


def served(ranks, loader, iterate):
    """Return the result of ``iterate(loader)`` on one rank that splits batches."""
    ranks.context.split = SplitBatches()
    step = make_step(Sharding, ranks)[0]
    try:
        detail = step.apply(TrainingObjects(loaders=[loader]))
        return iterate(loader), detail, ranks.context.split.share
    finally:
        step.undo()


def rows(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("collate", [None, stacked])
def test_each_rank_loads_its_part_of_each_batch_in_the_order_of_the_plain_loop(team, collate):
    def loop(ranks):
        torch.manual_seed(ranks.rank)
        dataset = Numbers()
        loader = DataLoader(dataset, 5, shuffle=True, collate_fn=collate)
        found, detail, share = served(ranks, loader, lambda loader: (len(loader), rows(loader), rows(loader)))
        with torch.no_grad():
            assert len(served(ranks, loader, rows)[0][0]) == 5
        return found, len(dataset.loaded) - 17, detail, share

    torch.manual_seed(0)
    plain = DataLoader(Numbers(), 5, shuffle=True)
    expected = rows(plain), rows(plain)
    results = team(2)(loop)
    for rank, ((length, *epochs), loaded, detail, share) in enumerate(results):
        assert length == 4
        cut = slice(0, 3) if rank == 0 else slice(3, 5)
        assert [epoch[:3] for epoch in epochs] == [[batch[cut] for batch in epoch[:3]] for epoch in expected]
        assert [epoch[3] for epoch in epochs] == [[epoch[3][rank]] for epoch in expected]
        assert loaded == (2 * 17 if collate else 20 if rank == 0 else 14)
        assert ("by the indices" in detail) is (collate is None)
        assert share == (rank, rank + 1, 2, 2)


def divided_by_sampler(rank):
    dataset = Numbers()
    return DataLoader(dataset, 5, sampler=DistributedSampler(dataset, 2, rank))


def divided_by_subset(rank):
    return DataLoader(Subset(Numbers(), range(rank, 17, 2)), 4)


@pytest.mark.parametrize("make", [divided_by_sampler, divided_by_subset])
def test_data_that_the_program_divides_are_an_error(team, make):
    def loop(ranks):
        with pytest.raises(NanoError, match=r"split_batches divides each batch.*Give every rank all data"):
            served(ranks, make(ranks.rank), rows)
        with torch.no_grad():
            return sum(map(len, served(ranks, make(ranks.rank), rows)[0]))

    assert sum(team(2)(loop)) in (17, 18)


def test_iteration_by_another_thread_is_an_error(team):
    def loop(ranks):
        refused = []

        def iterate(loader):
            def read():
                with pytest.raises(NanoError, match=r"another thread.*the loop's thread.*num_workers"):
                    rows(loader)
                refused.append(True)

            thread = threading.Thread(target=read)
            thread.start()
            thread.join()

        served(ranks, DataLoader(Numbers(), 4), iterate)
        return refused

    assert team(2)(loop) == [[True], [True]]


def test_loader_of_whole_batches_leaves_no_share(team):
    def loop(ranks):
        ranks.context.split = SplitBatches()
        step = make_step(Sharding, ranks)[0]
        divided, whole = DataLoader(Numbers(), 5), DataLoader(Numbers(), 4)
        try:
            step.apply(TrainingObjects(loaders=[divided]))
            step.apply(TrainingObjects(loaders=[whole], shard=False))
            next(iter(divided))
            share = ranks.context.split.share
            with torch.no_grad():
                assert len(next(iter(divided))) == 5
            return share, ranks.context.split.share, len(next(iter(whole))), ranks.context.split.share
        finally:
            step.undo()

    first, evaluated, count, last = team(2)(loop)[1]
    assert first == evaluated == (3, 5, 5, 2)
    assert (count, last) == (4, None)


def test_report_says_that_one_process_splits_nothing():
    class Loop(TorchNano):
        def train(self):
            self.setup(nn.Linear(1, 1))
            return self.share()

    loop = Loop(split_batches=True, verbose=False)
    assert loop.train() == 1.0
    assert loop.report["loaders"].code == "one_process"
