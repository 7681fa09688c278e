"""Loaders that the loop creates are divided like those passed to `setup`."""

import gc
import threading
import weakref

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from distributed.data_parallel.averaged import make_step
from nano_loop.distributed.comm.ranks import ALONE
from nano_loop.distributed.launch.active_runs import active_run
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.sharding import Sharding


class Stream(IterableDataset):
    """Numbers; each rank may select its own."""

    def __init__(self, rank=0, size=1):
        self.rank, self.size = rank, size

    def __iter__(self):
        return iter(range(self.rank, 20, self.size))


def numbers(count=20):
    return TensorDataset(torch.arange(count))


def sharding_of(ranks):
    """Return the step of a run after the setup of a model, and the model."""
    model, (step, _) = nn.Linear(1, 1), make_step(Sharding, ranks)
    step.observe(TrainingObjects(models=[model]))
    return step, model


def in_run(team, loop):
    """Return the results of ``loop(ranks, *sharding_of(ranks))`` on two ranks."""

    def run(ranks):
        step, model = sharding_of(ranks)
        try:
            return loop(ranks, step, model)
        finally:
            step.undo()

    return team(2)(run)


def seen(loader):
    return [torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist() for batch in loader]


def test_found_loader_is_whole_in_an_evaluation_and_before_a_model_is_set_up(team):
    def loop(ranks):
        unused, _ = make_step(Sharding, ranks)
        unused.observe(TrainingObjects(loaders=[]))
        loader = DataLoader(numbers(), 4)
        counts = [len(seen(loader))]
        step, model = sharding_of(ranks)
        with torch.no_grad():
            counts.append(len(seen(loader)))
            counts.append(len(loader))
        model.eval()
        counts += [len(seen(loader)), len(loader), len(seen(DataLoader(numbers(), 4)))]
        model.train()
        counts += [len(seen(loader)), len(loader)]
        step.apply(TrainingObjects(loaders=[loader], shard=False))  # late, but it counts
        counts.append(len(seen(loader)))
        step.undo()
        return [*counts, len(seen(loader))]

    assert team(2)(loop) == [[5, 5, 5, 5, 5, 5, 3, 3, 5, 5]] * 2


class Caching(Dataset):
    """Caches loaded samples."""

    def __init__(self):
        self.cache = {}

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.cache.setdefault(index, index)


def test_what_a_dataset_has_cached_on_each_rank_counts_for_nothing(team):
    def loop(ranks, step, model):
        data = Caching()
        counts = [len(seen(DataLoader(Subset(data, range(20)), 5))) for _ in range(3)]
        return counts, len(data.cache)

    assert in_run(team, loop) == [([2, 2, 2], 10)] * 2


class Looking(Dataset):
    """Iterates over a loader for each of its items."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return len(seen(DataLoader(numbers(), 5)))


def test_loaders_of_other_threads_inside_a_dataset_and_of_a_run_of_one_rank_are_left_alone(team):
    def loop(ranks, step, model):
        counts = []
        thread = threading.Thread(target=lambda: counts.append(len(seen(DataLoader(numbers(), 5)))))
        thread.start()
        thread.join()
        inside = [seen(DataLoader(Looking(), 1, num_workers=num_workers)) for num_workers in (0, 1)]
        with active_run(ALONE):
            counts.append(len(seen(DataLoader(numbers(), 5))))
        return counts, inside

    assert in_run(team, loop) == [([4, 4], [[[4], [4]]] * 2)] * 2


def test_found_loaders_and_their_datasets_are_let_go(team):
    def loop(ranks, step, model):
        data = numbers()
        gone = [weakref.ref(data)]
        for _ in range(2):
            loader = DataLoader(data, 5)
            gone.append(weakref.ref(loader))
            seen(loader)
        del data, loader
        gc.collect()
        in_header = [len(batch[0]) for batch in DataLoader(numbers(), 5, num_workers=1, persistent_workers=True)]
        return [each() is not None for each in gone], in_header

    assert in_run(team, loop) == [([False] * 3, [5, 5])] * 2
