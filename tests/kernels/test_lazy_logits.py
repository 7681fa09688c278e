"""All access to a lazy tensor returns its values or raises an error, and never returns uncomputed values."""

import copy
import io
import pickle
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.cpp_extension import load_inline
from torch.utils.dlpack import to_dlpack

from kernels.heads import WORDS, batch, gradients_of, inside_and_outside, model_of, small_heads
from nano_loop import accelerated
from nano_loop.kernels.head.logits import LazyLogits
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.patch_table import left_by_runs
from nano_loop.patching.torch_private import as_plain_tensors

pytestmark = [
    pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
]


@pytest.fixture(autouse=True)
def heads():
    with small_heads():
        yield


def saved_and_loaded(y):
    buffer = io.BytesIO()
    torch.save(y, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def set_as_data(y):
    x = torch.zeros(y.shape)
    x.data = y.clone()
    return x


def assigned(y):
    x = torch.zeros(y.shape)
    x[:] = y
    return x


def as_gradient(y):
    x = torch.zeros(y.shape, requires_grad=True)
    x.grad = y
    return x.grad


def as_seen_by_cpp(function):
    def called(y):
        with as_plain_tensors():
            return function(y)

    return called


READERS = {
    "tensor": torch.tensor,
    "as_tensor": lambda y: torch.as_tensor(y),
    "as_tensor, double": lambda y: torch.as_tensor(y, dtype=torch.float64).float(),
    "asarray": lambda y: torch.asarray(y),
    "asarray, copy": lambda y: torch.asarray(y, copy=True),
    "new_tensor": lambda y: y.new_tensor(y),
    "new_tensor of another": lambda y: torch.zeros(1).new_tensor(y),
    "Tensor": torch.Tensor,
    "as_subclass": lambda y: y.as_subclass(torch.Tensor),
    "data": lambda y: y.data,
    "set data": set_as_data,
    "assigned": assigned,
    "grad": as_gradient,
    "numpy": lambda y: torch.from_numpy(y.numpy()),
    "np.asarray": lambda y: torch.from_numpy(np.asarray(y)),
    "np.array": lambda y: torch.from_numpy(np.array(y)),
    "np.stack": lambda y: torch.from_numpy(np.stack([y, y]))[1],
    "tolist": lambda y: torch.tensor(y.tolist()),
    "iterated": lambda y: torch.stack([*y]),
    "indexed": lambda y: torch.stack([y[place] for place in range(len(y))]),
    "from_dlpack": torch.from_dlpack,
    "to_dlpack": lambda y: torch.from_dlpack(to_dlpack(y.clone())),
    "np.from_dlpack": lambda y: torch.from_numpy(np.from_dlpack(y)),
    "storage": lambda y: torch.empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride()),
    "set_": lambda y: torch.zeros(1).set_(y),
    "copy_": lambda y: torch.zeros(y.shape).copy_(y),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "save": saved_and_loaded,
    "clone": torch.clone,
    "cat": lambda y: torch.cat([torch.zeros_like(y)[:0], y]),
    "out": lambda y: torch.add(y, 0, out=torch.zeros(y.shape)),
    "numpy of a detached view": lambda y: torch.from_numpy(y.detach().reshape(-1, WORDS).numpy()).view(y.shape),
    "einsum": lambda y: torch.einsum("btv->btv", y),
    "shared": lambda y: y.share_memory_(),
    "bool": lambda y: y if (y == y).all() else None,
    **{
        f"{name}, from C++": as_seen_by_cpp(function)
        for name, function in {
            "add": lambda y: y + 0.0,
            "view": lambda y: y.reshape(-1).view(y.shape),
            "softmax": lambda y: y.softmax(-1).log() + y.logsumexp(-1, keepdim=True),
            "copy_": lambda y: torch.zeros(y.shape).copy_(y),
            "stack": lambda y: torch.stack([y, y])[0],
        }.items()
    },
}


@pytest.mark.parametrize("of", ["logits", "a view", "a product"])
@pytest.mark.parametrize("reader", READERS)
def test_what_reads_it_gets_its_numbers(reader, of):
    words, _ = batch()
    make = {"logits": lambda y: y, "a view": lambda y: y[:, :-1], "a product": lambda y: y * 2}[of]
    with torch.no_grad():
        expected = make(model_of()(words))
        model = model_of()
        with accelerated(model, verbose=False):
            y = make(model(words))
            assert isinstance(y, LazyLogits)
            found = READERS[reader](y)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.clone(), expected, rtol=1e-5, atol=1e-5)


def test_what_takes_an_address_gets_that_of_the_numbers_or_an_error():
    words, _ = batch()
    model = model_of()
    with torch.no_grad(), accelerated(model, verbose=False):
        y = model(words)
        with pytest.raises(RuntimeError):
            to_dlpack(y)
        with as_plain_tensors(), pytest.raises(RuntimeError):
            y.data_ptr()
        with pytest.raises(TypeError):
            memoryview(y)
        with pytest.raises(RuntimeError, match="Parameter"):
            nn.Parameter(y)
        assert y.data_ptr() == y.untyped_storage().data_ptr() == y.materialize().data_ptr() != 0


@pytest.mark.parametrize("make", [lambda y: y, lambda y: y[:, 1:], lambda y: y.transpose(1, 2), lambda y: y[:, 1:] * 2])
def test_what_a_lazy_tensor_says_of_itself_is_what_the_real_one_says(make):
    words, _ = batch()
    plain, model = make(model_of()(words)), model_of()
    with accelerated(model, verbose=False):
        y = make(model(words))
        for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "itemsize", "nbytes"):
            assert getattr(y, name) == getattr(plain, name), name
        for name in ("dim", "numel", "stride", "is_contiguous", "element_size", "__len__"):
            assert getattr(y, name)() == getattr(plain, name)(), name
        assert isinstance(y, torch.Tensor)
        assert y.is_lazy
        assert y.grad_fn is not None
        assert repr(y).startswith("tensor(")


WRITERS = {
    "setitem": lambda y: y.__setitem__((..., 0), -7.0),
    "of a view": lambda y: y.view(-1, WORDS)[:, 3].fill_(2.0),
    "mul_": lambda y: y.mul_(2),
    "detached": lambda y: y.detach().zero_(),
    "data": lambda y: y.data.view(-1).add_(1),
    "numpy": lambda y: y.detach().numpy().fill(3),
    "out": lambda y: torch.add(torch.ones(y.shape), 1, out=y),
    "inside of a function": lambda y: F.dropout(y, 1.0, inplace=True),
    "from C++": as_seen_by_cpp(lambda y: y.mul_(2)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_who_writes_to_it_changes_what_all_names_of_it_read(writer):
    words, targets = batch()

    def written(model):
        with torch.no_grad():
            y = model(words)
            view, copied = y[:, 1:], y * 3
            WRITERS[writer](y)
            return [each.clone() for each in (y, view, copied)] + [F.cross_entropy(y.view(-1, WORDS), targets.view(-1))]

    torch.testing.assert_close(*inside_and_outside(written), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("writer", ["setitem", "of a view", "mul_", "from C++"])
def test_gradient_of_what_was_written_to_is_torchs(writer):
    words, targets = batch()

    def written(model):
        y = model(words)
        view = y.view(-1, WORDS)
        WRITERS[writer](y)
        (F.cross_entropy(view, targets.view(-1)) + y.square().mean()).backward()
        return gradients_of(model)

    torch.testing.assert_close(*inside_and_outside(written), rtol=1e-4, atol=1e-6)


def test_it_outlives_its_run():
    words, targets = batch()
    model = model_of()
    with accelerated(model, verbose=False):
        y = model(words)
    assert not left_by_runs()
    with torch.no_grad():
        model.head.weight.zero_()
    torch.testing.assert_close(y.clone(), model_of()(words).detach(), rtol=1e-5, atol=1e-5)
    assert F.cross_entropy(y.view(-1, WORDS), targets.view(-1)).isfinite()


def test_data_set_to_it_has_its_numbers():
    words, _ = batch()
    model, expected = model_of(), model_of()(words).detach()
    x = torch.zeros(1)
    with accelerated(model, verbose=False):
        x.data = y = model(words)
        assert isinstance(y, LazyLogits)
        torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)
        x[0, 0, 0] = 3
        assert y[0, 0, 0] == 3
    assert "data" not in vars(torch.Tensor)


SOURCE = """
float typed(torch::Tensor y) { return y.data_ptr<float>()[0]; }
float mutable_one(torch::Tensor y) { return static_cast<float *>(y.mutable_data_ptr())[0]; }
bool constant_is_null(torch::Tensor y) { return y.const_data_ptr() == nullptr; }
float by_operators(torch::Tensor y) { return y.sum().item<float>(); }
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="the CPU has no C++ compiler beside it")
def test_an_extension_in_cpp_gets_an_error_or_the_numbers(tmp_path):
    functions = ["typed", "mutable_one", "constant_is_null", "by_operators"]
    extension = load_inline("reads_logits", SOURCE, functions=functions, build_directory=str(tmp_path))
    words, _ = batch()
    model, expected = model_of(), model_of()(words).sum().item()
    with torch.no_grad(), accelerated(model, verbose=False):
        for reading in (extension.typed, extension.mutable_one):
            with pytest.raises(RuntimeError):
                reading(model(words))
        assert extension.constant_is_null(model(words))
        assert extension.by_operators(model(words)) == pytest.approx(expected, rel=1e-4)
