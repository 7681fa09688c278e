"""Batches equal the default loader's bit for bit, in the same order, and consume the same random numbers."""

import re
import sys
from collections import namedtuple
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from nano_loop.data.collate import collate
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.fast_fetch import FastFetch, _Fetching


@pytest.fixture
def dataset():
    torch.manual_seed(0)
    return TensorDataset(torch.rand(23, 4), torch.arange(23), torch.rand(23, 2, 2).transpose(1, 2))


@pytest.fixture
def fast(step):
    """Apply the step to a loader, and return the loader."""

    def apply(loader):
        step(FastFetch).apply(TrainingObjects(loaders=[loader]))
        return loader

    return apply


def epochs(loader, count=2):
    torch.manual_seed(7)
    batches = [batch for _ in range(count) for batch in loader]
    return batches, torch.get_rng_state()


def assert_equal(one, other):
    """Compare two batches of lists, dicts, strings and tensors."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert (one.stride(), one.dtype) == (other.stride(), other.dtype)
    elif isinstance(one, str):
        assert one == other
    else:
        assert len(one) == len(other)
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_equal(one[key], other[key])


def assert_same(one, other):
    (left, left_rng), (right, right_rng) = one, other
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert_equal(a, b)
    assert torch.equal(left_rng, right_rng), "the loop after the epoch would draw other numbers"


@contextmanager
def only_whole_batches(kind=TensorDataset):
    """Fail if a single sample of a dataset of this class is fetched, with code that looks like the class's own."""

    def one_by_one(self, index):
        raise AssertionError("a sample is fetched one by one")

    with pytest.MonkeyPatch.context() as patch:
        names = vars(sys.modules.get(kind.__module__, sys.modules[__name__]))
        patch.setattr(kind, "__getitem__", FunctionType(one_by_one.__code__, names))
        yield


LOADERS = {
    "in order": lambda data: DataLoader(data, batch_size=4),
    "shuffled": lambda data: DataLoader(data, batch_size=4, shuffle=True),
    "drop_last": lambda data: DataLoader(data, batch_size=4, shuffle=True, drop_last=True),
    "one a batch": lambda data: DataLoader(data),
    "a batch of all": lambda data: DataLoader(data, batch_size=100),
    "generator": lambda data: DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "sampler": lambda data: DataLoader(data, 4, sampler=WeightedRandomSampler(torch.ones(23), 30)),
    "with replacement": lambda data: DataLoader(data, 4, sampler=RandomSampler(data, replacement=True, num_samples=40)),
    "subset": lambda data: DataLoader(Subset(data, [5, 3, 3, 20, 1]), batch_size=2, shuffle=True),
    "subset of a subset": lambda data: DataLoader(Subset(Subset(data, list(range(0, 20, 2))), [9, 0, 4]), batch_size=2),
    "subset by tensor": lambda data: DataLoader(Subset(data, torch.tensor([5, 3, 1])), batch_size=2),
    "positions from the end": lambda data: DataLoader(data, 4, sampler=[3, -1, 0, -23, 5]),
    "positions in tensors": lambda data: DataLoader(data, 4, sampler=torch.arange(22, -1, -1)),
    "positions of numpy": lambda data: DataLoader(data, 4, sampler=np.arange(23)),
    "batch sampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(SequentialSampler(data), 5, drop_last=False)
    ),
}


WHOLE = "whole batches sliced from memory, 1 of 1 loaders"


@pytest.fixture
def assert_fetched(step):
    """Check what the report says of a loader, and that its epochs are those of the default loader."""

    def check(make, said=WHOLE, around=None):
        expected, loader = epochs(make()), make()
        made = step(FastFetch)
        assert made.skip_reason(TrainingObjects(loaders=[loader])) is None
        assert said in made.apply(TrainingObjects(loaders=[loader]))
        with around or nullcontext():
            assert_same(epochs(loader), expected)

    return check


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_batches_order_and_random_draws_are_the_default_loaders(assert_fetched, dataset, make):
    assert_fetched(lambda: make(dataset), around=only_whole_batches())


NO_ROWS = [True, 1.5, torch.tensor([1]), torch.tensor(True), slice(0, 2), None, 23]


def outcome(loader):
    """Return the first batch, or the kind of error."""
    try:
        return next(iter(loader))
    except Exception as error:  # any error of the sampler's index, in torch and in numpy
        return str(type(error))


@pytest.mark.parametrize("index", NO_ROWS, ids=repr)
@pytest.mark.parametrize(
    "values", [torch.rand(23, 4), np.random.default_rng(0).random((23, 4))], ids=["torch", "numpy"]
)
def test_index_that_is_no_row_selects_what_it_selects_by_default_or_raises_its_error(step, values, index):
    class Indexed:
        def __init__(self):
            self.values = values

        def __getitem__(self, index):
            return (self.values[index],)

    datasets = [Indexed(), *([TensorDataset(values)] if isinstance(values, torch.Tensor) else [])]
    for data in datasets:
        loaders = [DataLoader(data, 2, sampler=[index, index]) for _ in range(2)]
        step(FastFetch).apply(TrainingObjects(loaders=loaders[:1]))
        assert_equal(*map(outcome, loaders))


class OfSkorch(Dataset):
    """Like skorch's `Dataset`: it indexes arrays or dicts of arrays, and returns zeros without targets."""

    __module__, __qualname__ = "skorch.dataset", "Dataset"

    def __init__(self, X, y=None):  # noqa: N803
        self.X, self.y = X, y

    def __len__(self):
        return 23

    def __getitem__(self, i):
        sample = {key: value[i] for key, value in self.X.items()} if isinstance(self.X, dict) else self.X[i]
        return sample, torch.Tensor([0]) if self.y is None else self.y[i]


def takes_truths():
    """Whether this torch collates booleans of this numpy; torch 2.8 does not."""
    try:
        default_collate([np.True_])
    except TypeError:
        return False
    return True


ROWS = np.random.default_rng(0).normal(size=(23, 4))
DATASETS = {
    "tensor": lambda data: torch.rand(23, 4),
    "bools": lambda data: torch.rand(23, 4) > 0.5,
    "bytes": lambda data: torch.randint(256, (23, 3, 5), dtype=torch.uint8),
    "complex": lambda data: torch.randn(23, 2, dtype=torch.complex64),
    "bf16": lambda data: torch.randn(23, 3).bfloat16(),
    "nothing in a row": lambda data: torch.empty(23, 0),
    "channels_last": lambda data: torch.rand(23, 3, 4, 4).to(memory_format=torch.channels_last),
    "numbers": lambda data: torch.arange(23),
    "transposed": lambda data: torch.rand(4, 23).t(),
    "subset": lambda data: Subset(torch.rand(23, 4), [3, 1, 1, 8]),
    "array": lambda data: ROWS,
    "array in fp32": lambda data: ROWS.astype(np.float32),
    "array of columns": lambda data: np.asfortranarray(ROWS),
    "array backwards": lambda data: ROWS[::-1],
    "array that is read only": lambda data: np.broadcast_to(np.arange(4.0), (23, 4)),
    "numbers in an array": lambda data: np.arange(23, dtype=np.int32),
    **({"truths in an array": lambda data: ROWS[:, 0] > 0} if takes_truths() else {}),
    "concatenated": lambda data: ConcatDataset([data, TensorDataset(*(t[:9] + 1 for t in data.tensors))]),
    "concatenated subsets": lambda data: ConcatDataset([Subset(data, [3, 1]), data, Subset(data, range(5, 9))]),
    "subset of concatenated": lambda data: Subset(ConcatDataset([data, data]), [40, 3, -1, 22, 23]),
    "concatenated dtypes": lambda data: ConcatDataset([np.ones((9, 2), np.float32), np.zeros((9, 2))]),
    "random split": lambda data: random_split(data, [0.4, 0.6])[1],
    "stacked": lambda data: StackDataset(data, ROWS),
    "stacked by name": lambda data: StackDataset(x=data, y=torch.arange(23)),
    "concatenated stacks": lambda data: ConcatDataset([StackDataset(a=ROWS), StackDataset(a=ROWS[:3])]),
    "skorch": lambda data: OfSkorch(ROWS.astype(np.float32), np.arange(23)),
    "skorch without targets": lambda data: OfSkorch(torch.eye(23)),
    "skorch with names": lambda data: OfSkorch({"a": ROWS, "b": torch.arange(23)}, ROWS[:, 0]),
    "subset of skorch": lambda data: Subset(OfSkorch(ROWS, np.arange(23)), np.arange(1, 20)),
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # from torch, for single rows
@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_batches_of_tensors_arrays_and_containers_are_the_default_loaders(assert_fetched, dataset, make):
    data = make(dataset)
    around = None if type(data) in (np.ndarray, torch.Tensor) else only_whole_batches(type(data))
    assert_fetched(lambda: DataLoader(data, 4, shuffle=True), around=around)


@pytest.mark.parametrize("dtype", [">i4", ">f8"])
def test_arrays_of_another_byte_order_are_fetched_by_the_default_loader(assert_fetched, dtype):
    data = StackDataset(torch.rand(23, 4), np.arange(23).astype(dtype))
    assert_fetched(lambda: DataLoader(data, 4, shuffle=True), "ndarray")


def test_datasets_that_do_not_fit_together_have_the_default_loaders_error(fast):
    data = ConcatDataset([torch.zeros(3, 2), torch.zeros(3, 4)])
    loader = fast(DataLoader(data, 6))
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(iter(loader))


def test_report_says_how_other_loaders_fetch(step, dataset):
    loaders = [DataLoader(dataset), DataLoader(OwnDataset()), DataLoader(dataset, num_workers=2)]
    said = step(FastFetch).apply(TrainingObjects(loaders=loaders))
    assert said.startswith("whole batches sliced from memory, 2 of 3 loaders; ")
    assert "OwnDataset" in said
    assert "2 workers" in said


Point = namedtuple("Point", ["x", "y"])
WORDS = [f"word {number}" for number in range(23)]
IMAGES = np.random.default_rng(1).integers(256, size=(23, 4, 5, 3), dtype=np.uint8)

#: The samples of custom datasets by position.
SAMPLES = {
    "pair": lambda i: (ROWS[i], ROWS[i, 0]),
    "with an int": lambda i: (ROWS[i].astype(np.float32), i),
    "named tuple": lambda i: Point(ROWS[i], IMAGES[i]),
    "dict": lambda i: {"x": ROWS[i], "word": WORDS[i], "both": [ROWS[i, :2], torch.tensor(i)]},
    "array alone": lambda i: ROWS[i],
    "rows of columns": lambda i: np.asfortranarray(ROWS)[i],
    "image with the channels first": lambda i: IMAGES[i].transpose(2, 0, 1),
    "images": lambda i: IMAGES[i : i + 1].transpose(0, 3, 1, 2),
    "truths": lambda i: ROWS[i] > 0,
    "complex": lambda i: ROWS[i].astype(np.complex64),
    "half": lambda i: ROWS[i].astype(np.float16),
    "nothing in a row": lambda i: np.empty((0, 3)),
    "no dimension": lambda i: np.array(i),
    "read only": lambda i: np.broadcast_to(ROWS[i, 0], (3,)),
    "drawn": lambda i: (torch.rand(2), np.random.default_rng(i).random(3)),
    "two dtypes": lambda i: ROWS[i].astype(np.float32 if i % 2 else np.float64),
    "two layouts": lambda i: IMAGES[i] if i % 2 else np.asfortranarray(IMAGES[i]),
    "a subclass": lambda i: ROWS[i].view(OwnArray),
    "a tensor among arrays": lambda i: torch.from_numpy(ROWS[i]) if i == 2 else ROWS[i],
    # Refused by torch.
    "sizes": lambda i: ROWS[i, : 2 + i % 2],
    "backwards": lambda i: ROWS[i, ::-1],
    "words": lambda i: np.array(["a"]),
    "objects": lambda i: np.array([None]),
    "other bytes": lambda i: ROWS[i].astype(">f8"),
    "dates": lambda i: np.array(["2026-11-27"], "M8[D]"),
    "lengths": lambda i: (ROWS[i],) * (1 + i % 2),
    "sparse": lambda i: torch.eye(2).to_sparse(),
    "nothing": lambda i: None,
}


class OfSamples(Dataset):
    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return self.sample(index)


class OfItems(OfSamples):
    def __getitems__(self, indices):
        return [self.sample(index) for index in indices]


class Streamed(IterableDataset):
    def __init__(self, sample):
        self.sample = sample

    def __iter__(self):
        return map(self.sample, range(23))


def own_loaders(sample):
    """Return loaders of custom datasets."""
    torch.manual_seed(5)
    listed = [sample(i) for i in range(23)]
    return [
        DataLoader(OfSamples(sample), 4, shuffle=True),
        DataLoader(OfItems(sample), 4, sampler=WeightedRandomSampler(torch.ones(23), 30), drop_last=True),
        DataLoader(listed, batch_sampler=OwnBatchSampler(RandomSampler(listed), 3, False)),
        DataLoader(Streamed(sample), 5),
        DataLoader(Subset(listed, [3, 1, 20]), generator=torch.Generator().manual_seed(3), shuffle=True),
    ]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # from torch, once per process
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_samples_of_other_datasets_are_collated_as_by_torch_or_have_its_errors(step, sample):
    for plain, loader in zip(own_loaders(sample), own_loaders(sample), strict=True):
        try:
            expected = epochs(plain)
        except Exception as error:  # any error of torch
            expected = error
        made = step(FastFetch)
        assert made.skip_reason(TrainingObjects(loaders=[loader])) is None
        made.apply(TrainingObjects(loaders=[loader]))
        if isinstance(expected, Exception):
            with pytest.raises(type(expected), match=f"^{re.escape(str(expected))}$"):
                epochs(loader)
        else:
            assert_same(epochs(loader), expected)


def doubled(values, *, collate_fn_map):
    return [default_collate([*each]) * 2 for each in zip(*values, strict=True)]


REGISTERED = {
    "Tensor": (torch.Tensor, lambda values, *, collate_fn_map: torch.stack([*values]) * 2),
    "ndarray": (np.ndarray, lambda values, *, collate_fn_map: torch.zeros(len(values))),
    "tuple": (tuple, doubled),
    "a base class of tuple": (Sequence, doubled),
    "a class of the program's": (Mock, lambda values, *, collate_fn_map: None),
}


IN_ARRAYS = OfSamples(lambda i: ROWS[i])


@pytest.mark.parametrize("when", ["before the set-up", "before the first epoch", "before the second", "in the second"])
@pytest.mark.parametrize("kind", REGISTERED)
def test_function_that_the_program_registers_at_any_time_collates(step, monkeypatch, kind, when):
    data = IN_ARRAYS if kind == "ndarray" else TensorDataset(torch.rand(8, 3), torch.arange(8))

    def batches(setup):
        with monkeypatch.context() as patch:
            made, loader, iterator = [], DataLoader(data, 4), None
            for moment in ("before the set-up", "before the first epoch", "before the second", "in the second"):
                if moment == when:
                    patch.setitem(default_collate_fn_map, *REGISTERED[kind])
                if moment == "before the set-up":
                    setup(loader)
                elif moment == "in the second":
                    made += iterator
                else:
                    iterator = iter(loader)
                    made += iterator if moment == "before the first epoch" else [next(iterator)]
        return made

    expected = batches(lambda loader: None)
    found = batches(lambda loader: step(FastFetch).apply(TrainingObjects(loaders=[loader])))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_report_says_that_samples_are_collated_by_the_program(step, monkeypatch, dataset):
    monkeypatch.setitem(default_collate_fn_map, tuple, doubled)
    words = step(FastFetch).apply(TrainingObjects(loaders=[DataLoader(dataset, 4)]))
    assert "the program has registered a function with torch's collate" in words


class OwnItems(TensorDataset):
    def __getitem__(self, index):
        return index


class OwnSubset(Subset):
    def __getitems__(self, indices):
        return [(torch.zeros(1),) for _ in indices]

    def __getitem__(self, index):
        return (torch.zeros(1),)


class OwnDataset(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(index)


class OwnArray(np.ndarray):
    pass


class OwnBatchSampler(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda data: DataLoader(data, collate_fn=lambda batch: batch), "collate_fn"),
        (lambda data: DataLoader(data, num_workers=2), "workers"),
        (lambda data: DataLoader(data, batch_size=None), "collate_fn"),
    ],
)
def test_it_keeps_its_hands_off_what_is_the_users_own(step, dataset, make, code):
    loader = make(dataset)
    assert step(FastFetch).skip_reason(TrainingObjects(loaders=[loader])).code == code


class Rows(Dataset):
    """The base of custom datasets."""

    def __init__(self, x, y):
        self.x, self.y, self.shifted, self.names = x, y, x + 1, WORDS
        self.__own = y

    def __len__(self):
        return len(self.x)


def rows(getitem, **attributes):
    """A dataset class with a ``__getitem__``."""
    return type("Indexing", (Rows,), {"__getitem__": getitem, **attributes})


class Assigned(Rows):
    def __getitem__(self, i):
        """Return a sample."""
        row, label, again = self.x[i], self.y[i], self.x[i]
        return [row, (label, again, row)]


class Named(Rows):
    def __getitem__(own, position):  # noqa: N805
        inputs = own.x[position]
        label = own.y[position]
        return {"inputs": inputs, "label": label}


Pair = rows(lambda self, index: (self.x[index], self.y[index]))
ONLY_INDEX = {
    "pair": Pair,
    "inherited": type("Inherited", (Pair,), {}),
    "assigned": Assigned,
    "named": Named,
    "one by name": rows(lambda self, index: {"inputs": {"x": self.x[index]}}),
    "one": rows(lambda self, index: self._Rows__own[index]),
}


@pytest.mark.parametrize("kind", ONLY_INDEX.values(), ids=ONLY_INDEX)
@pytest.mark.parametrize("made_of", ["tensors", "arrays"])
def test_datasets_that_only_index_have_whole_batches(assert_fetched, dataset, kind, made_of):
    x, y = dataset.tensors[2], dataset.tensors[1]
    data = kind(x, y) if made_of == "tensors" else kind(x.numpy(), np.arange(23.0))
    makers = [
        lambda data: DataLoader(data, 4, shuffle=True),
        lambda data: DataLoader(Subset(data, [3, -1, 8, 8]), 3, sampler=torch.tensor([0, 3, 2, 1])),
        lambda data: DataLoader(ConcatDataset([data, data]), 5, drop_last=True, generator=torch.Generator()),
    ]
    for make in makers:
        assert_fetched(lambda make=make: make(data), around=patch("nano_loop.data.whole_batches.collate", None))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [Pair, "arrays", "list"])
def test_epochs_that_are_left_early_and_generators_that_are_set_back(step, dataset, kind, seed):
    def batches(fetches):
        data = [(ROWS[i], i) for i in range(23)]
        if kind != "list":
            data = OfSamples(lambda i: ROWS[i]) if kind == "arrays" else Pair(*dataset.tensors[:2])
        generator = torch.Generator().manual_seed(seed)
        sampler = RandomSampler(data, replacement=True, num_samples=40)
        loaders = [DataLoader(data, 4, shuffle=True, generator=generator), DataLoader(data, 3, sampler=sampler)]
        for loader in loaders if fetches else ():
            step(FastFetch).apply(TrainingObjects(loaders=[loader]))
        torch.manual_seed(seed)
        left = [batch for loader in loaders for batch, _ in zip(loader, range(2), strict=False)]
        state = generator.get_state()
        left += [*loaders[0], torch.rand(2)]
        generator.set_state(state)
        return [*left, *loaders[0], *loaders[1], torch.rand(2)], torch.get_rng_state()

    assert_same(batches(fetches=True), batches(fetches=False))


def test_changes_to_a_dataset_that_only_indexes_are_seen(fast, monkeypatch):
    data = Pair(torch.ones(8, 2), torch.arange(8))
    loader = fast(DataLoader(data, 2))
    batches = iter(loader)
    next(batches)
    data.x[2] = 5
    assert next(batches)[0].tolist() == [[5, 5], [1, 1]]
    data.x = [7] * 8
    assert next(batches)[0].tolist() == [7, 7]
    monkeypatch.setattr(Pair, "__getitem__", lambda self, index: -index)
    assert next(batches).tolist() == [-6, -7]


@pytest.mark.parametrize("method", ["__getitem__", "__getitems__"])
@pytest.mark.parametrize("kind", [TensorDataset, Subset, ConcatDataset, StackDataset])
def test_method_that_the_program_puts_into_a_class_of_torch_reads_samples(fast, dataset, monkeypatch, kind, method):
    data = {TensorDataset: dataset, Subset: Subset(dataset, range(23)), StackDataset: StackDataset(dataset)}
    loader = fast(DataLoader(data.get(kind, ConcatDataset([dataset])), 2))
    batches = iter(loader)
    next(batches)

    def read(self, which):
        return [torch.tensor(-place) for place in which] if method == "__getitems__" else torch.tensor(-which)

    monkeypatch.setattr(kind, method, read, raising=False)
    if hasattr(kind, "__getitems__") and method == "__getitem__":
        monkeypatch.delattr(kind, "__getitems__")
    for rest in (next(batches), next(iter(loader))):
        assert rest.tolist() in ([-2, -3], [0, -1])


class Shadowed(Rows):
    def __init__(self, x, y):
        super().__init__(x, y)
        vars(self)["hidden"] = x
        self.real = self.values = y

    @property
    def hidden(self):
        return self.y


class Counts(Rows):
    seen = 0

    def __getitem__(self, index):
        self.seen += 1
        return self.x[index], self.seen


class Recovers(Rows):
    def __getitem__(self, index):
        try:
            return self.x[index + 20]
        except IndexError:
            return self.x[index]


class ItemStream(IterableDataset, Pair):
    def __iter__(self):
        return iter(range(9))


def intercepted(self, name):
    value = object.__getattribute__(self, name)
    return value + 1 if name == "x" else value


DO_MORE = {
    **{kind.__name__: kind for kind in (Counts, Recovers, ItemStream)},
    "shadowed": type("Indexing", (Shadowed,), {"__getitem__": lambda self, index: self.hidden[index]}),
    "part of values": type(
        "Indexing", (Shadowed,), {"__getitem__": lambda self, index: (self.x.real[index], self.values[index])}
    ),
    "intercepted": rows(lambda self, index: self.x[index], __getattribute__=intercepted),
    "items": rows(
        lambda self, index: (self.x[index], self.y[index]),
        __getitems__=lambda self, indices: [(torch.tensor(index), 0) for index in indices],
    ),
    "twice": rows(lambda self, index: self.x[index] * 2),
    "one of two": rows(lambda self, index: self.x[index] if torch.rand(1) < 0.5 else self.x[index] * 2),
    "the zeroth": rows(lambda self, index: self.x[index] if index else self.shifted[index]),
    "draws": rows(lambda self, index: (self.x[index], torch.rand(1))),
    "with index": rows(lambda self, index: (self.x[index], index)),
    "with a number": rows(lambda self, index: (self.x[index], 3)),
    "first of a row": rows(lambda self, index: self.x[index][0]),
    "fixed": rows(lambda self, index: self.x[0]),
    "part of a row": rows(lambda self, index: self.x[index, :1]),
    "attribute of a row": rows(lambda self, index: self.x[index].T),
    "by name": rows(lambda self, index: (self.x[index], self.names[index])),
    "computed": rows(lambda self, index: self.twice[index], twice=property(lambda self: self.x * torch.rand(1))),
    "of itself": rows(lambda self, index: self.x[index] if isinstance(index, list) else self[[index]]),
}


@pytest.mark.parametrize("kind", DO_MORE.values(), ids=DO_MORE)
def test_datasets_that_do_more_than_index_fetch_their_samples(assert_fetched, dataset, kind):
    assert_fetched(lambda: DataLoader(kind(*dataset.tensors[:0:-1]), 4, shuffle=kind is not ItemStream), kind.__name__)


@pytest.mark.parametrize(
    "make",
    [
        lambda data: OwnItems(*data.tensors),
        lambda data: OwnSubset(data, [1]),
        lambda data: ConcatDataset([data, OwnDataset()]),
        lambda data: StackDataset(data, OwnItems(*data.tensors)),
        lambda data: ROWS.view(OwnArray),
        lambda data: nn.Parameter(torch.rand(3, 2)),
        lambda data: np.array(["a", "b"]),
        lambda data: TensorDataset(torch.eye(3).to_sparse()),
    ],
)
def test_samples_of_other_classes_are_fetched_by_them(dataset, make):
    changes = _Fetching().attributes(DataLoader(make(dataset)))
    assert changes == {"collate_fn": collate}


def test_writing_into_a_batch_reaches_neither_the_dataset_nor_other_rows(fast):
    arrays, tensors = [np.ones(2), np.ones(2)], TensorDataset(torch.ones(2, 2))
    for data in (arrays, tensors):
        for batch in fast(DataLoader(data, 1)):
            (batch if data is arrays else batch[0]).zero_()
    assert sum(map(np.sum, arrays)) == tensors.tensors[0].sum() == 4
    row, (_, again, same) = next(iter(fast(DataLoader(Assigned(torch.ones(4, 2), torch.ones(4)), 4))))
    row.zero_()
    assert again.sum() == same.sum() == 8


class Halves(torch.Tensor):
    def __getitem__(self, index):
        return self.as_subclass(torch.Tensor)[index] / 2


@pytest.mark.parametrize("wrap", [lambda rows: rows, TensorDataset])
def test_rows_of_a_tensor_subclass_are_its_own(fast, wrap):
    def loader():
        return DataLoader(wrap(torch.arange(8.0).as_subclass(Halves)), 4)

    assert str([*fast(loader())]) == str([*loader()])
