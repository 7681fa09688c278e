"""Batches come from as many worker processes as the option says, in the same order, and the loader stays as it is."""

import os

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.fast_fetch import FastFetch
from nano_loop.steps.loader_workers import LoaderWorkers


class Processes(Dataset):
    """Returns each index with the process that has fetched it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index, os.getpid()])


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def fetched(loader):
    torch.manual_seed(0)
    rows = torch.cat([*loader])
    return rows[:, 0].tolist(), {*rows[:, 1].tolist()}


def test_workers_fetch_in_the_order_of_the_loop(step):
    loader = DataLoader(Processes(), 2, shuffle=True)
    order, alone = fetched(loader)
    made = step(LoaderWorkers, loader_workers=2)
    assert made.apply(TrainingObjects(loaders=[loader])) == "2 for 1 of 1 loaders"
    again, workers = fetched(loader)
    made.undo()
    assert (again, alone, len(workers)) == (order, {os.getpid()}, 2)
    assert os.getpid() not in workers
    assert (loader.num_workers, loader.prefetch_factor) == (0, None)
    assert fetched(loader) == (order, alone)


def test_workers_of_the_loader_are_left_out_for_zero(step):
    loader = DataLoader(Processes(), 2, num_workers=1, timeout=5, prefetch_factor=3, persistent_workers=True)
    made = step(LoaderWorkers, loader_workers=0)
    made.apply(TrainingObjects(loaders=[loader]))
    assert fetched(loader)[1] == {os.getpid()}
    made.undo()
    assert (loader.num_workers, loader.timeout, loader.prefetch_factor) == (1, 5, 3)


@pytest.mark.parametrize("kind", [torch.Tensor, list], ids=["tensor", "list of arrays"])
def test_batches_are_fetched_and_collated_in_workers(step, kind):
    rows = torch.arange(12.0).view(6, 2)
    loader = DataLoader(rows if kind is torch.Tensor else [*rows.numpy()], 2)
    made = [step(FastFetch), step(LoaderWorkers, loader_workers=1)]
    for each in made:
        each.apply(TrainingObjects(loaders=[loader]))
    batches = [*loader]
    assert torch.equal(torch.cat(batches), rows)
    assert all(batch.is_shared() for batch in batches)
    for each in reversed(made):
        each.undo()


@pytest.mark.parametrize(("count", "asked"), [(None, False), (0, True), (1, True)])
def test_step_is_asked_for_by_a_number(step, count, asked):
    assert step(LoaderWorkers, loader_workers=count).enabled is asked


def test_iterable_dataset_is_left_alone(step):
    made = step(LoaderWorkers, loader_workers=2)
    assert made.skip_reason(TrainingObjects(loaders=[DataLoader(Endless())])).code == "iterable_dataset"
