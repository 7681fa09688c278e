"""Loaders with their own iteration are divided like others, and their lengths match the number of batches."""

import pytest
import torch
from torch.utils.data import DataLoader

from distributed.sharding.test_implicit_loaders import Stream, in_run, numbers, seen, sharding_of
from nano_loop.runtime.objects.training_objects import TrainingObjects


class Repeated:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


class OfManyEpochs(DataLoader):
    """Creates its only iterator in the constructor, as timm's loader does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class ByItself(DataLoader):
    """Uses no method of `DataLoader`."""

    def __iter__(self):
        for indices in self.batch_sampler:
            yield self.collate_fn([self.dataset[index] for index in indices])


class Twice(ByItself):
    """Yields more batches than the base class."""

    def __len__(self):
        return 2 * super().__len__()

    def __iter__(self):
        yield from super().__iter__()
        yield from super().__iter__()


class Halved(DataLoader):
    """Changes the batches of `DataLoader` without being a generator."""

    def __iter__(self):
        batches = super().__iter__()
        return ([batch[0] / 2] for batch in batches)


class Unread(DataLoader):
    """Asks for its length in the constructor, before it has a sampler."""

    def __init__(self, dataset, batch_size, **kwargs):
        self.dataset = dataset
        with pytest.raises(AttributeError, match="has no attribute"):
            len(self)
        del self.dataset
        super().__init__(dataset, batch_size, **kwargs)

    def __iter__(self):
        yield from super().__iter__()


KINDS = (OfManyEpochs, ByItself, Twice, Halved, Unread)


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_class_with_its_own_iteration_is_divided(team, kind, shuffle, found):
    def loop(ranks):
        torch.manual_seed(7)
        early = kind(numbers(24), 3, shuffle=shuffle) if kind is not Unread else None
        step, _ = sharding_of(ranks)
        loader = early or kind(numbers(24), 3, shuffle=shuffle)
        if not found:
            step.apply(TrainingObjects(loaders=[loader]))
        lengths = [len(loader)]
        epochs = []
        for _ in range(3):
            epochs.append(seen(loader))
            lengths.append(len(loader))
        with torch.no_grad():
            whole = len(seen(loader)) if kind is not OfManyEpochs else 8 * 2 ** (kind is Twice)
        step.undo()
        return epochs, lengths, whole

    (first, lengths, whole), (second, *other) = team(2)(loop)
    share = 8 if kind is Twice else 4
    assert [lengths, whole] == other == [[share] * 4, 2 * share]
    for one, two in zip(first, second, strict=True):
        assert len(one) == len(two) == share
        rows = sorted(int(row * (2 if kind is Halved else 1)) for batch in one + two for row in batch)
        assert rows == sorted([*range(24)] * (2 if kind is Twice else 1))


def test_class_over_an_iterable_dataset_is_divided(team):
    class Stepwise(DataLoader):
        def __iter__(self):
            yield from super().__iter__()

    def loop(ranks, step, model):
        return [seen(Stepwise(Stream(), 3)), seen(Stepwise(Stream(), 3))]

    first, second = in_run(team, loop)
    assert first == [[[0, 1, 2], [6, 7, 8], [12, 13, 14], [18, 19]]] * 2
    assert second == [[[3, 4, 5], [9, 10, 11], [15, 16, 17], [0, 1, 2]]] * 2


def test_class_is_as_before_after_the_run(team):
    def methods():
        return [(vars(kind).get("__iter__"), vars(kind).get("__len__")) for kind in KINDS]

    def loop(ranks):
        before, (step, _), during = methods(), sharding_of(ranks), methods()
        step.undo()
        return before == methods(), [one[0] is other[0] for one, other in zip(before, during, strict=True)]

    assert team(2)(loop) == [(True, [False] * len(KINDS))] * 2
