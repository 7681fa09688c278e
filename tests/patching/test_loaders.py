"""A copy iterates for the loader, changes compose, and no trace is left in the loader or a process."""

import multiprocessing
import pickle
import weakref
from contextlib import ExitStack

import pytest
from torch.utils.data import DataLoader, Dataset

from nano_loop.patching import loaders
from nano_loop.patching.lifetime import undone_with
from nano_loop.patching.loaders import LoaderChange, changed


class Numbers(Dataset):
    def __init__(self, count=6):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


class Order(LoaderChange):
    """A change to another order and another length."""

    def __init__(self, *batches):
        self.batches = batches

    def attributes(self, loader):
        return {"batch_sampler": self.batches}

    def length(self, loader, length):
        return length - 1


class Collate(LoaderChange):
    def __init__(self, collate):
        self.collate = collate

    def attributes(self, loader):
        return {"collate_fn": self.collate}


class Around(LoaderChange):
    def iterate(self, loader, start):
        yield from (("around", each) for each in start())

    def length(self, loader, length):
        return length * 10


@pytest.fixture(autouse=True)
def no_trace():
    pickle.dumps(DataLoader(Numbers()))  # Python caches its reduce data on the class
    before = dict(vars(DataLoader))
    yield
    assert dict(vars(DataLoader)) == before
    assert not loaders._proxies
    assert not multiprocessing.active_children()


def test_changes_compose():
    loader = DataLoader(Numbers(), batch_size=3)
    with changed(loader, Order([5], [0, 1])), changed(loader, Collate(tuple)), changed(loader, Around()):
        assert list(loader) == [("around", (5,)), ("around", (0, 1))]
        assert len(loader) == 10
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]
    assert len(loader) == 2


def test_loader_itself_is_not_changed_and_others_are_served_as_ever():
    loader, other = DataLoader(Numbers(), batch_size=3), DataLoader(Numbers(), batch_size=3)
    before = dict(vars(loader))
    with changed(loader, Order([5])):
        list(loader)
        assert vars(loader) == before
        assert type(loader) is DataLoader
        assert len(list(other)) == len(other) == 2
        assert len(list(pickle.loads(pickle.dumps(loader)))) == 2


def test_latest_change_of_a_class_is_in_force_until_it_has_left_as_often_as_it_came_in_any_order():
    loader, one, other = DataLoader(Numbers(), collate_fn=list), Order([1]), Order([2])
    with ExitStack() as last:
        with ExitStack() as first:
            for _ in range(2):
                first.enter_context(changed(loader, one))
            with changed(loader, other):
                assert list(loader) == [[2]]
                assert len(loader) == 5
            with changed(loader, one):
                pass
            assert list(loader) == [[1]]
            assert len(loader) == 5
            last.enter_context(changed(loader, other))
        assert list(loader) == [[2]]
    assert len(list(loader)) == 6


def test_subclass_with_attributes_and_an_iter_and_a_length_of_its_own():
    class Own(DataLoader):
        def __init__(self, *, times):
            self.times = times
            super().__init__(Numbers(), collate_fn=list)

        def __getstate__(self):
            raise TypeError("cannot be pickled")

        def __iter__(self):
            for batch in super().__iter__():
                yield batch * self.times

        def __len__(self):
            return super().__len__() * 100

    loader = Own(times=2)
    with changed(loader, Order([1])):
        assert list(loader) == [[1, 1]]
        assert len(loader) == 500


def test_a_change_goes_with_its_loader_and_with_the_workers_that_it_has_kept():
    loader = DataLoader(Numbers(), collate_fn=list, num_workers=1, persistent_workers=True)
    gone = weakref.ref(loader)
    with ExitStack() as undoing:
        for change in (Around(), Order([1], [2])):
            undone_with(loader, undoing).enter_context(changed(loader, change))
        assert [*loader] == [("around", [1]), ("around", [2])]
        del loader
        assert gone() is None
        assert not loaders._proxies
        assert not workers()


def workers():
    return {each.pid for each in multiprocessing.active_children()}


def test_persistent_workers_serve_all_epochs_of_their_change_and_end_with_the_run():
    loader = DataLoader(Numbers(), collate_fn=list, num_workers=1, persistent_workers=True)
    with changed(loader, Order([1], [2])):
        assert list(loader) == [[1], [2]]
        with changed(loader, Order([3])):
            assert list(loader) == [[3]]
        assert list(loader) == [[1], [2]]
        first = workers()
        assert list(loader) == [[1], [2]]
        held = iter(loader)
        next(held)
        assert workers() == first
        assert len(first) == 1
    assert not workers()


def test_workers_of_an_earlier_iteration_are_the_loaders_own_and_stay():
    loader = DataLoader(Numbers(), collate_fn=list, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 6
    before, iterator = workers(), loader._iterator
    with changed(loader, Order([1], [2])):
        assert list(loader) == [[1], [2]]
        assert workers() > before
    assert workers() == before
    assert loader._iterator is iterator
    assert len(list(loader)) == 6
    del loader, iterator


def test_nothing_stays_where_the_run_fails():
    loader = DataLoader(Numbers(), collate_fn=list, num_workers=1, persistent_workers=True)

    def run():
        with changed(loader, Order([1], [2])):
            for _ in loader:
                raise KeyError("in the loop")

    with pytest.raises(KeyError) as caught:
        run()
    assert caught.traceback  # it holds the frame, and so the iterator
    assert not workers()
