"""A batch that was loaded whole is split along its first dimension, whatever its type, or an error says why."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from nano_loop.distributed.sharding.batch_parts import BatchParts
from nano_loop.errors import NanoError

COUNT = 5
Pair = namedtuple("Pair", "x name")


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    epoch: int = 3


class Pinned:
    """A batch class as in torch's documentation."""

    def __init__(self, x):
        self.x = x

    def pin_memory(self):
        return self


class Graphs:
    """Has the interface of PyG's batches."""

    def __init__(self, graphs):
        self.graphs = graphs

    @classmethod
    def from_data_list(cls, graphs):
        return cls(graphs)

    def to_data_list(self):
        return self.graphs

    @property
    def num_graphs(self):
        return len(self.graphs)


def sequences():
    return [torch.arange(n) for n in (2, 4, 1, 3, 2)]


X = torch.arange(10.0).reshape(COUNT, 2)
NAMES = [*"abcde"]
#: A batch of each kind, and a function that returns its samples.
BATCHES = {
    "tensor": (X, lambda batch: batch.tolist()),
    "array": (X.numpy(), lambda batch: batch.tolist()),
    "no rows": (X[:, :0], lambda batch: [0] * len(batch)),
    "dict": ({"x": X, "name": NAMES, "size": 7}, lambda batch: [*zip(batch["x"].tolist(), batch["name"], strict=True)]),
    "mapping": (UserDict(x=X), lambda batch: batch.data["x"].tolist()),
    "tuple": ((X, X[:, 0], None), lambda batch: [*zip(batch[0].tolist(), batch[1].tolist(), strict=True)]),
    "named tuple": (Pair(X, NAMES), lambda batch: [*zip(batch.x.tolist(), batch.name, strict=True)]),
    "dataclass": (Batch(X), lambda batch: [[batch.epoch, *row] for row in batch.x.tolist()]),
    "class with pin_memory": (Pinned(X), lambda batch: batch.x.tolist()),
    "columns in columns": ([[X, X], NAMES], lambda batch: [*zip(batch[0][1].tolist(), batch[1], strict=True)]),
    "samples": ([(row, 1) for row in X], lambda batch: [row.tolist() for row, _ in batch]),
    "images and boxes": (
        (
            tuple(torch.full((3, n + 1, 4), n) for n in range(COUNT)),
            tuple({"box": torch.ones(n, 4)} for n in range(COUNT)),
        ),
        lambda batch: [(image.shape, box["box"].shape) for image, box in zip(*batch, strict=True)],
    ),
    "sorted sequences": (
        pack_sequence(sorted(sequences(), key=len, reverse=True)),
        lambda batch: [one.tolist() for one in unpack_sequence(batch)],
    ),
    "sequences": (
        pack_sequence(sequences(), enforce_sorted=False),
        lambda batch: [one.tolist() for one in unpack_sequence(batch)],
    ),
    "jagged": (
        torch.nested.nested_tensor(sequences(), layout=torch.jagged),
        lambda batch: [one.tolist() for one in batch.unbind()],
    ),
    "sparse": (X.to_sparse(), lambda batch: batch.to_dense().tolist()),
    "graphs": (Graphs(NAMES), lambda batch: batch.graphs),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_all_ranks_are_the_batch_in_its_order(name, size):
    batch, samples = BATCHES[name]
    parts = [BatchParts(rank, size).part(batch, COUNT) for rank in range(size)]
    assert all(type(part) is type(batch) for _, part in parts)
    assert [sample for _, part in parts for sample in samples(part)] == [*samples(batch)]
    assert [share.samples for share, _ in parts] == [len(samples(part)) for _, part in parts]


@pytest.mark.parametrize("name", sorted({*BATCHES} - {"samples", "images and boxes"}))
def test_without_a_count_a_batch_has_as_many_samples_as_its_first_column(name):
    share, _ = BatchParts(1, 2).part(BATCHES[name][0], None)
    assert share == (3, 5, 5, 2)


def test_batch_of_fewer_samples_than_ranks_stays_whole():
    batch = {"x": X[:2]}
    assert BatchParts(1, 3).part(batch, 2)[1] is batch


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((X.T, X), r"a Tensor at batch\[0\] of length 2, but the batch has 5 samples"),
        ({"x": X, "lengths": [1, 2]}, r"a list at batch\['lengths'\] of length 2, which may or may not be columns"),
        ((X, object()), r"an? object at batch\[1\] of an unsupported type"),
        ({"epoch": 3}, r"without a column of 5 samples"),
    ],
)
def test_what_has_no_samples_is_an_error_of_three_parts(batch, words):
    with pytest.raises(NanoError, match=rf"{words}.*first dimension.*collate_fn"):
        BatchParts(0, 2).part(batch, COUNT)


def test_list_inside_of_a_batch_keeps_its_meaning_where_its_length_is_that_of_the_batch():
    def batch_of(count):
        return [[X[:count], X[:count]], X[:count]]

    parts = BatchParts(0, 2)
    words = r"a list at batch\[0\] of length 2, which may or may not be columns of 2 samples"
    with pytest.raises(NanoError, match=words):
        parts.part(batch_of(2), 2)
    parts.part(batch_of(5), 5)
    (left, right), y = parts.part(batch_of(2), 2)[1]
    assert (left.shape, right.shape, y.shape) == ((1, 2), (1, 2), (1, 2))
