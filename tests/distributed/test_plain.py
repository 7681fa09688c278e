"""Values between hosts arrive as they were sent, and a message that nobody has encoded is an error and nothing else."""

import itertools
import os
import pickle
import random
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from nano_loop import NanoError
from nano_loop.data.random_states import process_states
from nano_loop.distributed.comm import plain

Point = namedtuple("Point", "x y")


def arrived(value):
    return plain.loads(plain.dumps(value))


VALUES = [
    None,
    True,
    -(10**40),
    0.1,
    float("inf"),
    1 + 2j,
    "a \ud800 letter",
    b"\x00\xff",
    (1, [2, (3,)], {"a": None, 4: {5, 6}, (7,): frozenset([8])}),
    torch.bfloat16,
    torch.Size([2, 3]),
    [torch.Size([]), torch.float8_e5m2],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_arrive(value):
    got = arrived(value)
    assert got == value
    assert type(got) is type(value)


def raw(dtype):
    """Six elements of a dtype whose bytes differ; None where torch cannot make them of bytes."""
    count = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    try:
        return (count % 2 if dtype is torch.bool else count).view(dtype)
    except RuntimeError:
        return None


def dtypes():
    every = dict.fromkeys(each for each in vars(torch).values() if isinstance(each, torch.dtype))
    return [each for each in every if not str(each).startswith("torch.q") and raw(each) is not None]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_tensors_of_every_dtype_arrive_to_the_bit(dtype):
    tensor = raw(dtype)
    got = arrived(tensor)
    assert (got.dtype, got.shape) == (dtype, tensor.shape)
    assert got.view(torch.uint8).equal(tensor.view(torch.uint8))


def test_strides_of_dense_tensors_arrive_and_other_tensors_become_contiguous():
    image = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for tensor in (image, torch.rand(3, 4).t(), torch.rand(()), torch.empty(0, 3)):
        got = arrived(tensor)
        assert got.equal(tensor)
        assert got.stride() == tensor.stride()
    for tensor in (torch.rand(4, 6)[:, ::2], torch.rand(3).expand(2, 3), torch.rand(2, dtype=torch.complex64).conj()):
        got = arrived(tensor)
        assert got.equal(tensor)
        assert got.is_contiguous()
    assert arrived(torch.ones(2, requires_grad=True)).requires_grad


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support is in beta")
def test_sparse_tensors_arrive():
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    for tensor in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        got = arrived(tensor)
        assert got.layout == tensor.layout
        assert got.to_dense().equal(dense)


def test_arrays_and_numbers_of_numpy_arrive():
    for array in (np.arange(6, dtype=">i2").reshape(2, 3), np.ones(2, dtype=np.complex64), np.array(True)):
        got = arrived(array)
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)
        got[...] = 0  # it can be written to
    got = arrived(np.float32(0.1))
    assert got == np.float32(0.1)
    assert type(got) is np.float32


def test_named_tuples_arrive_as_tuples():
    assert arrived([Point(1, 2)]) == [(1, 2)]
    assert type(arrived(Point(1, 2))) is tuple


def test_random_states_and_optimizer_states_are_plain():
    generators = [np.random.default_rng(0), np.random.Generator(np.random.SFC64(1)), np.random.RandomState(2)]
    states = [process_states(), generators[0].bit_generator.state, generators[1].bit_generator.state]
    states += [generators[2].get_state(), random.Random(3).getstate(), torch.Generator().get_state()]
    for one, other in zip(_leaves(states), _leaves(arrived(states)), strict=True):
        assert one.equal(other) if isinstance(one, torch.Tensor) else np.array_equal(one, other)
    model = torch.nn.Linear(2, 2)
    for kind in (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RAdam, torch.optim.LBFGS):
        optimizer = kind(model.parameters())
        optimizer.step(lambda: _backward(model))
        arrived([*optimizer.state.values()])


def _backward(model):
    model.zero_grad()
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    return loss.detach()


def _leaves(value):
    if isinstance(value, dict):
        value = [*value.values()]
    return itertools.chain(*map(_leaves, value)) if isinstance(value, (list, tuple)) else [value]


class Mine:
    pass


@pytest.mark.parametrize(
    "value",
    [Mine(), [{"a": Mine()}], OrderedDict(), Path("x"), np.array([None]), torch.nn.Parameter(torch.ones(1)), len],
    ids=["object", "object in a dict", "OrderedDict", "path", "array of objects", "parameter", "function"],
)
def test_other_objects_are_not_plain(value):
    with pytest.raises(plain.NotPlainError):
        plain.dumps(value)


def test_what_contains_itself_is_not_plain():
    value = []
    value.append(value)
    with pytest.raises(plain.NotPlainError):
        plain.dumps(value)


MESSAGES = {
    "empty": b"",
    "pickle": pickle.dumps([1]),
    "no JSON": b"NLv1\x02\x00\x00\x00{x",
    "cut": plain.dumps(torch.ones(3))[:-1],
    "longer": plain.dumps(torch.ones(3)) + b"x",
    "unknown kind": plain.dumps([1]).replace(b'"list"', b'"exec"'),
    "unknown dtype": plain.dumps(torch.ones(1)).replace(b'"float32"', b'"qint8xx"'),
    "no dtype": plain.dumps(torch.ones(1)).replace(b'"float32"', b'"empty_ "'),
    "other shape": plain.dumps(torch.ones(3)).replace(b'["list", [3]]', b'["list", [9]]'),
    "negative shape": plain.dumps(torch.ones(2, 2)).replace(b'["list", [2, 2]]', b'["list", [-4, -1]]'),
    "strides beyond the memory": plain.dumps(torch.ones(2, 2)).replace(b"[2, 1]", b"[8, 1]"),
    "index outside a sparse tensor": plain.dumps(torch.eye(2).to_sparse()).replace(
        b'"torch.sparse_coo", ["list", [2, 2]]', b'"torch.sparse_coo", ["list", [1, 2]]'
    ),
    "array of objects": plain.dumps(np.ones(1)).replace(b'"<f8"', b'"|O8"'),
    "key that cannot be hashed": plain.dumps({1: 2}).replace(b"[1, 2]", b'[["list", []], 2]'),
    "another blob": plain.dumps(b"x").replace(b'["bytes", [], 0]', b'["bytes", [], 7]'),
    "data of a list": plain.dumps([b"x"]).replace(b'["bytes", [], 0]]', b'["bytes", [], 0]], 0'),
    "number in place of a dtype": plain.dumps(torch.ones(1)).replace(b'["dtype", ["float32"]]', b"3"),
    "list in place of a stored tensor": plain.dumps(torch.eye(2).to_sparse()).replace(b'["tensor"', b'["list"'),
}


def _with_header_length(message):
    """The message with the length that its header has now."""
    if not message.startswith(b"NLv1") or b'"blobs"' not in message:
        return message
    end = message.index(b"}", message.index(b'"blobs"')) + 1
    return message[:4] + (end - 8).to_bytes(4, "little") + message[8:]


@pytest.mark.parametrize("name", MESSAGES)
def test_malformed_message_is_an_error_with_three_parts(name):
    message = _with_header_length(MESSAGES[name])
    with pytest.raises(NanoError, match=r"a malformed message of \d+ bytes .*: ranks exchange .*\. Run the same"):
        plain.loads(message)


def test_random_bytes_do_nothing_but_raise():
    whole, draw = plain.dumps([torch.ones(2), {"a": (1, b"x")}, np.ones(2), torch.eye(2).to_sparse()]), random.Random(0)
    for _ in range(2000):
        broken = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        try:
            plain.loads(bytes(broken))
        except NanoError:
            continue


def test_nothing_of_a_pickle_is_executed(tmp_path):
    marker = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    with pytest.raises(NanoError):
        plain.loads(pickle.dumps(Evil()))
    assert not marker.exists()
