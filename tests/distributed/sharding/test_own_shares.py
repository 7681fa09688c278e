"""Data that the program divides by rank is not divided again, and other differences between ranks are reported."""

import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
)
from torch.utils.data.datapipes.iter import IterableWrapper, ShardingFilter

from distributed.sharding.test_implicit_loaders import Stream, in_run, numbers, seen, sharding_of
from nano_loop.patching import user_code
from nano_loop.runtime.objects.training_objects import TrainingObjects


class OfRank(Sampler):
    """Yields this rank's indices, and asks for the rank only when iterated."""

    def __iter__(self):
        rank = torch.distributed.get_rank()
        return iter(range(rank, 20, 2))

    def __len__(self):
        return 10


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Asking(IterableDataset):
    """Asks for the rank at each read, in a loader's worker, too."""

    def __iter__(self):
        return iter(range(torch.distributed.get_rank(), 20, 2))


DIVIDED = {
    "subset": lambda rank: DataLoader(Subset(numbers(), range(rank, 20, 2)), 5),
    "tensors": lambda rank: DataLoader(TensorDataset(torch.arange(20)[rank::2]), 5),
    "rows of a list": lambda rank: DataLoader(Rows([*range(20)][rank::2]), 5),
    "sampler": lambda rank: DataLoader(numbers(), 5, sampler=OfRank()),
    "batch sampler": lambda rank: DataLoader(numbers(), batch_sampler=BatchSampler(OfRank(), 5, False)),
    "indices": lambda rank: DataLoader(numbers(), 5, sampler=[*range(20)][rank::2]),
    "numpy's indices": lambda rank: DataLoader(numbers(), 5, sampler=[*np.arange(20)[rank::2]]),
    "single indices": lambda rank: DataLoader(Rows(torch.arange(20)), batch_size=None, sampler=OfRank()),
    "iterable": lambda rank: DataLoader(Stream(rank, 2), 5),
    "iterable that asks": lambda rank: DataLoader(Asking(), 5),
    "iterable that asks, in workers": lambda rank: DataLoader(Asking(), 5, num_workers=1),
    "single items": lambda rank: DataLoader(Asking(), batch_size=None),
    "data pipe": lambda rank: DataLoader(ShardingFilter(IterableWrapper(range(20))), 5),
    "DistributedSampler": lambda rank: DataLoader(numbers(), 5, sampler=DistributedSampler(numbers(), shuffle=False)),
    "DistributedSampler of rank 0, of which each rank has a copy": lambda rank: DataLoader(
        numbers(), 5, sampler=DistributedSampler(numbers(), 2, 0, shuffle=False)
    ),
    "DistributedSampler in another": lambda rank: DataLoader(
        numbers(), batch_sampler=BatchSampler(DistributedSampler(numbers(), shuffle=False), 5, False)
    ),
}


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize("name", DIVIDED)
def test_data_that_the_loop_has_divided_is_not_divided_again(team, name, found):
    def loop(ranks, make):
        step, _ = sharding_of(ranks)
        loader = make(ranks.rank)
        if not found:
            step.apply(TrainingObjects(loaders=[loader]))
        epochs = [seen(loader), seen(loader)]
        told = step.final_result()
        step.undo()
        length = None if isinstance(loader.dataset, IterableDataset) else len(loader)
        return [[*flat(epoch)] for epoch in epochs], told and told.code, length

    is_known = name.startswith("DistributedSampler")  # recognized without a comparison
    length = 10 if name == "single indices" else 2
    for rank, (epochs, code, own_length) in enumerate(team(2)(loop, DIVIDED[name])):
        assert epochs == [[*range(rank, 20, 2)]] * 2
        assert code == (None if is_known else "divided_by_program")
        assert own_length in (None, length)


def flat(batches):
    return itertools.chain.from_iterable(batch if isinstance(batch, list) else [batch] for batch in batches)


@pytest.mark.parametrize("found", [True, False])
def test_ranks_of_a_divided_sampler_take_as_many_steps(team, found):
    def loop(ranks, step, model):
        loader = DataLoader(numbers(21), 5, sampler=[*range(21)][ranks.rank :: 2])
        if not found:
            step.apply(TrainingObjects(loaders=[loader]))
        epochs = [seen(loader), seen(loader)]
        length = len(loader), len(iter(loader))
        with torch.no_grad():
            alone = len(seen(loader)), len(loader)
        return epochs, length, alone

    (first, *same), (second, length, alone) = in_run(team, loop)
    assert first == [[[0, 2, 4, 6, 8], [10, 12, 14, 16, 18], [20]]] * 2
    assert second == [[[1, 3, 5, 7, 9], [11, 13, 15, 17, 19], [1, 3, 5, 7, 9]]] * 2
    assert [*same, length, alone] == [(3, 3), (3, 3), (3, 3), (2, 2)]


@pytest.mark.parametrize("kind", ["iterable", "sampler", "subset"])
def test_a_loop_may_divide_one_epoch_and_not_the_next(team, kind):
    class Changing(Sampler):
        rows = range(20)

        def __iter__(self):
            return iter(self.rows)

    class Reading(IterableDataset):
        def __iter__(self):
            return iter(self.sampler)

    def loop(ranks, step, model):
        sampler, data, subset = Changing(), Reading(), Subset(numbers(), range(20))
        data.sampler = sampler
        loader = {
            "iterable": lambda: DataLoader(data, 5),
            "sampler": lambda: DataLoader(numbers(), 5, sampler=sampler),
            "subset": lambda: DataLoader(subset, 5),
        }[kind]()
        step.apply(TrainingObjects(loaders=[loader]))
        epochs = []
        for rows in (range(20), range(ranks.rank, 20, 2), range(20)):
            sampler.rows = subset.indices = rows
            epochs.append([*flat(seen(loader))])
        return epochs

    divided = [[*range(5), *range(10, 15)], [*range(5, 10), *range(15, 20)]]
    assert in_run(team, loop) == [[divided[rank], [*range(rank, 20, 2)], divided[rank]] for rank in (0, 1)]


def test_endless_and_empty_streams_of_a_rank_are_read_as_they_are(team):
    class Uneven(IterableDataset):
        def __iter__(self):
            return iter(()) if torch.distributed.get_rank() else itertools.count()

    def loop(ranks, step, model):
        loader = DataLoader(Uneven(), 2)
        step.apply(TrainingObjects(loaders=[loader]))
        return [[batch.tolist() for batch in itertools.islice(loader, 3)] for _ in range(2)]

    assert in_run(team, loop) == [[[[0, 1], [2, 3], [4, 5]]] * 2, [[], []]]


# --- data that differs between ranks at random ---


class Hidden(Sampler):
    """Draws from a generator that cannot be found."""

    def __init__(self, rank):
        self.drawn = (random.Random(seed).sample(range(20), 20) for seed in itertools.count(10 * rank))

    def __iter__(self):
        return iter(next(self.drawn))

    def __len__(self):
        return 20


class Shuffled(IterableDataset):
    def __init__(self, rank):
        self.order = Hidden(rank)

    def __iter__(self):
        return ({"x": torch.full((3,), float(row)), "name": str(row)} for row in self.order)


DRAWN = {
    "sampler": lambda rank: DataLoader(numbers(), 4, sampler=Hidden(rank)),
    "stream": lambda rank: DataLoader(Shuffled(rank), 4),
    "stream, as lists": lambda rank: DataLoader(Shuffled(rank), 4, collate_fn=list),
    "stream of single items": lambda rank: DataLoader(Shuffled(rank), batch_size=None),
}


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize("name", DRAWN)
def test_data_drawn_differently_on_each_rank_is_whole_and_told_once(team, name, found):
    def loop(ranks, make):
        user_code._warned.clear()
        step, _ = sharding_of(ranks)
        loader = make(ranks.rank)
        if not found:
            step.apply(TrainingObjects(loaders=[loader]))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            counts = [len([*loader]), len([*loader])]
        code = step.final_result().code
        step.undo()
        return counts, code, [str(each.message) for each in warned]

    (counts, code, (told,)), (other_counts, _, nothing) = team(2)(loop, DRAWN[name])
    assert counts == other_counts == [20 if "single" in name else 5] * 2
    assert code == "drawn_differently"
    assert ("TensorDataset" if name == "sampler" else "Shuffled") in told
    assert nothing == []


@pytest.mark.parametrize("name", ["padded", "few values", "Subset"])
def test_divided_data_is_not_taken_for_drawn_differently(team, name):
    def make(rank):
        if name == "padded":
            return DataLoader(numbers(), 4, sampler=[[*range(0, 19, 2)], [*range(1, 19, 2), 0]][rank])
        if name == "few values":
            return DataLoader(Rows([0, 1] * 10), sampler=[[1, *range(2, 20, 2)], [*range(1, 20, 2), 0]][rank])
        return DataLoader(Subset(numbers(), range(rank, 20, 2)), 4, shuffle=True)

    def loop(ranks, step, model):
        loader = make(ranks.rank)
        with warnings.catch_warnings(record=True) as warned:
            for _ in range(2):
                seen(loader)
        code = step.final_result().code
        return code, len(warned)

    assert in_run(team, loop) == [("divided_by_program", 0)] * 2
