"""A worker loads the caller's objects in shared memory; objects that cannot be sent are reported by name."""

import functools
import gc
import itertools
import operator
import os
import pickle
import shutil
import subprocess
import sys
import threading
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from nano_loop.api.torch_nano import TorchNano
from nano_loop.distributed.payload.payload import dump, load
from nano_loop.errors import NanoError

MIB = 2**20
LARGE = MIB // 4  # float32 elements of the smallest buffer with its own file


@pytest.fixture
def send(team, tmp_path):
    """Send an object to a second process, and return the result of ``check(object)`` there."""
    numbers = itertools.count()

    def sent(call, check):
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        dump(call, folder, {})
        return team(2)(lambda ranks: check(load(folder)))[1]

    return sent


# --- memory ---


def open_files(folder):
    return [to for each in Path("/proc/self/fd").iterdir() if str(folder) in (to := os.path.realpath(each))]


def mapping(folder):
    """Return the kB that this process has mapped from `folder`, by the names in smaps."""
    sizes, inside = {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            inside = str(folder) in line
        elif inside and rest[-1] == "kB":
            sizes[name[:-1]] = sizes.get(name[:-1], 0) + int(rest[0])
    return sizes


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_large_memory_is_shared_until_somebody_writes(team, tmp_path, kind):
    array = np.random.default_rng(0).random(8 * MIB)
    dump(array if kind == "array" else torch.from_numpy(array), tmp_path, {})

    def look(ranks):
        value = load(tmp_path)
        assert not open_files(tmp_path)
        ranks.barrier()
        if ranks.rank == 0:
            shutil.rmtree(tmp_path)
        total = float(value.sum())
        ranks.barrier()
        sizes = mapping(tmp_path)
        ranks.barrier()
        if ranks.rank == 1:
            value[:] = 1
        ranks.barrier()
        return total, sizes, float(value.sum())

    (total, sizes, kept), (_, _, written) = team(2)(look)
    assert total == kept == pytest.approx(array.sum())
    assert written == array.size
    assert sizes["Rss"] >= 64 * 1024
    assert sizes["Private_Clean"] + sizes["Private_Dirty"] == 0
    assert sizes["Pss"] <= 33 * 1024


def test_what_training_writes_is_read_into_ordinary_memory(send, tmp_path):
    model = nn.Linear(LARGE, 1)
    model.register_buffer("mean", torch.rand(LARGE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(1, LARGE)).backward()
    optimizer.step()
    free = torch.zeros(LARGE, requires_grad=True)
    expected = model.weight.tolist()

    def check(call):
        return mapping(tmp_path), call[0].weight.tolist(), len(call[1].state)

    assert send((model, optimizer, free), check) == ({}, expected, 2)
    assert len([*tmp_path.glob("*/[0-9]*")]) == 5  # weight, gradient, buffer, momentum, and the free one


def test_dumping_copies_no_large_memory(tmp_path):
    call = (torch.zeros(16 * MIB), np.zeros(16 * MIB), np.asfortranarray(np.zeros((4, 4 * MIB))))
    tracemalloc.start()
    try:
        dump(call, tmp_path, {})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * MIB
    assert sorted(each.stat().st_size // MIB for each in tmp_path.glob("[0-9]*")) == [64, 128, 128]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("full", ["payload", "0"])
def test_full_folder_is_an_error_with_numbers(tmp_path, full):
    (tmp_path / full).symlink_to("/dev/full")
    with pytest.raises(NanoError) as caught:
        dump(torch.zeros(MIB), tmp_path, {})
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "bytes were free" in message
    assert "TMPDIR" in message  # the folder is not in shared memory
    assert "No space left" in message
    assert ("at least 4,194,304 bytes" in message) == (full == "0")
    assert isinstance(caught.value.__cause__, OSError)


# --- tensors ---


def shown(tensor):
    """Return all properties in which equal tensors must agree."""
    if tensor.layout is not torch.strided:
        return tensor.layout, tensor.shape, tensor.to_dense().tolist()
    if tensor.is_meta:
        return tensor.device, tensor.dtype, tensor.shape, tensor.stride()
    place = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
    values = tensor.detach().resolve_conj().resolve_neg().flatten().contiguous().view(torch.uint8).numpy().tobytes()
    return tensor.dtype, place, tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), vars(tensor), values


def with_attribute():
    tensor = torch.rand(3)
    tensor.label = "mine"
    return tensor


TENSORS = {
    "plain": lambda: torch.rand(3, 4),
    "transposed": lambda: torch.rand(3, 4).t(),
    "part": lambda: torch.rand(30)[3:20:4],
    "expanded": lambda: torch.rand(1).expand(1000),
    "expanded, large": lambda: torch.rand(LARGE, 1).expand(-1, 2),
    "channels_last": lambda: torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "bf16": lambda: torch.rand(5).bfloat16(),
    "bool": lambda: torch.tensor([True, False]),
    "uint16": lambda: torch.tensor([1, 65535]).to(torch.uint16),
    "complex": lambda: torch.rand(3, dtype=torch.complex64),
    "conjugate": lambda: torch.rand(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.rand(3, dtype=torch.complex64).conj().imag,
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(2.0),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "sparse": lambda: torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse(),
    "csr": lambda: torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse_csr(),
    "requires grad": lambda: torch.rand(3, requires_grad=True),
    "with an attribute": with_attribute,
    "large": lambda: torch.arange(float(LARGE)),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_tensors_arrive_as_they_were(send, make):
    tensor = make()
    assert send(tensor, shown) == shown(tensor)


@pytest.mark.parametrize("size", [8, LARGE])
def test_views_of_one_storage_stay_views_of_it(send, size):
    whole = torch.zeros(size)

    def check(call):
        whole, part, matrix = call
        part[0] = 7.0
        return whole[4].item(), matrix[1, 0].item()

    assert send((whole, whole[4:], whole.view(2, -1)), check) == (7.0, 7.0 if size == 8 else 0.0)


def test_gradients_hooks_and_their_handles_arrive(send):
    parameter, free = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    seen = []
    handles = [each.register_hook(lambda gradient: gradient * 3) for each in (parameter, free)]
    parameter.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.tolist()))
    parameter.grad, free.grad = torch.ones(2), torch.ones(2)

    def check(call):
        (parameter, free), handles, seen = call
        (parameter + free).sum().backward()
        handles[0].remove()
        parameter.sum().backward()
        return parameter.grad.tolist(), free.grad.tolist(), seen

    expected = ([5.0, 5.0], [4.0, 4.0], [[4.0, 4.0], [5.0, 5.0]])
    assert send(((parameter, free), handles, seen), check) == expected


# --- arrays ---


ARRAYS = {
    "plain": lambda: np.arange(6).reshape(2, 3),
    "large": lambda: np.random.default_rng(0).random(MIB),
    "Fortran": lambda: np.asfortranarray(np.random.default_rng(0).random((300, 40))),
    "Fortran, large": lambda: np.asfortranarray(np.random.default_rng(0).random((300, 600))),
    "structured": lambda: np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "0-d": lambda: np.array(3.5),
    "empty": lambda: np.empty((0, 3)),
    "objects": lambda: np.array([{"a": 1}, None, "x"], dtype=object),
    "gaps": lambda: np.arange(12.0).reshape(3, 4)[:, ::2],
    "gaps, large": lambda: np.random.default_rng(0).random((512, 1024))[:, ::2],
    "dates": lambda: np.array(["2020-01-01"], dtype="M8[D]"),
}


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_arrive_as_they_were(send, make, writable):
    array = make()
    array.flags.writeable = writable

    def shown(array):
        values = array.tolist() if array.dtype.hasobject else array.tobytes()
        return type(array), array.dtype, array.shape, array.flags.f_contiguous, values

    assert send(array, lambda it: (*shown(it), it.flags.writeable or it.dtype.hasobject)) == (
        *shown(array),
        writable or array.dtype.hasobject,  # pickle creates new arrays of objects
    )


@pytest.mark.parametrize("mode", ["r", "r+", "w+", "c"])
def test_mapped_file_arrives_as_its_name_and_is_not_written(send, tmp_path, mode):
    numbers = np.arange(2 * MIB, dtype=np.int32)
    numbers.tofile(tmp_path / "data")
    whole = np.memmap(tmp_path / "data", np.int32, mode, offset=400, shape=(MIB, 1))
    if mode != "r":
        whole[:] = numbers[100 : 100 + MIB, None]
        whole[7] = -1
    part = whole[-5::-3]

    def check(arrays):
        whole, part = arrays
        result = type(whole), whole.shape, part.ravel()[:3].tolist(), whole[7, 0].item(), part.flags.writeable
        if part.flags.writeable:
            whole[:] = part[:] = 0
        return result

    expected = (np.memmap, whole.shape, part.ravel()[:3].tolist(), whole[7, 0].item(), mode != "r")
    assert send((whole, part), check) == expected
    assert whole[8] == 108
    assert sum(each.stat().st_size for each in tmp_path.glob("*/*")) < MIB or mode == "c"


# --- models ---


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decode.weight = self.encode.weight
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.decode(self.encode(x)) * self.scale


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


def test_same_objects_and_tied_weights_stay_one_and_stay_the_optimizers(send):
    model, shared = Tied(), {"tensor": torch.zeros(2)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def check(call):
        model, optimizer, (one, other), again = call
        weight = model.encode.weight
        held = any(each is weight for each in optimizer.param_groups[0]["params"])
        return model.decode.weight is weight, held, one is other is again["again"]

    assert send((model, optimizer, (shared, shared), {"again": shared}), check) == (True, True, True)


class Locked(nn.LSTM):
    """Omits attributes that cannot be pickled, as the base class does."""

    def __init__(self, *args):
        super().__init__(*args)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {name: value for name, value in super().__getstate__().items() if name != "lock"}


def test_hooks_parametrizations_and_local_classes_arrive(send):
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    lstm = weight_norm(Locked(2, 2), "weight_hh_l0")
    model = nn.Sequential(weight_norm(nn.Linear(3, 3)), Scaled(3, 2), lstm, nn.LazyLinear(2))
    model[1].register_forward_hook(lambda module, args, output: output + 1)
    x = torch.rand(2, 3)
    expected = model[2](model[1](model[0](x)))[0].tolist()

    def check(model):
        return model[2](model[1](model[0](x)))[0].tolist(), model[3](x).shape

    assert send(model, check) == (expected, (2, 2))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_parametrizations_of_recurrent_layers_are_not_computed_by_sending_them(tmp_path, kind):
    """In train mode, each computation of a spectral norm changes its buffers."""
    layer = spectral_norm(kind(2, 2), "weight_hh_l0")
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    dump(layer, tmp_path, {})
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)


def counting_backend(graph, inputs):
    counting_backend.compiled += 1
    return graph.forward


counting_backend.compiled = 0


@pytest.mark.parametrize("way", ["model.compile", "torch.compile", "parametrized", "function"])
def test_compiled_stays_compiled_by_the_same_backend(send, way):
    model, x = Tied(), torch.rand(1, 3)
    expected = (model(x) * (2 if way == "parametrized" else 1)).tolist()
    if way == "model.compile":
        model.compile(backend=counting_backend)
    elif way == "torch.compile":
        model = torch.compile(model, backend=counting_backend)
    elif way == "parametrized":
        parametrize.register_parametrization(model, "scale", Doubled())
        model = torch.compile(model, backend=counting_backend)
    else:
        model = torch.compile(lambda x, linear=model: linear(x), backend=counting_backend)

    def check(model):
        torch.compiler.reset()  # remove other tests' compiled code
        before = counting_backend.compiled
        result = model(x).tolist()
        return result, counting_backend.compiled - before, type(model).__name__

    assert send(model, check) == (expected, 1, type(model).__name__)


# --- optimizers and schedulers ---


class Marked(torch.optim.SGD):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mark = "mine"


def test_optimizer_keeps_hooks_state_and_attributes(send):
    parameter, steps = nn.Parameter(torch.ones(1)), []
    optimizer = Marked([parameter], lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: steps.append("before"))
    optimizer.register_step_post_hook(lambda *_: steps.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "hooked": True})
    parameter.grad = torch.ones(1)
    optimizer.step()

    def check(call):
        optimizer, parameter, steps = call
        optimizer.step()
        return parameter.tolist(), steps, optimizer.state_dict()["hooked"], optimizer.mark, type(optimizer) is Marked

    there = send((optimizer, parameter, steps), check)
    optimizer.step()
    assert there == (parameter.tolist(), ["before", "after"] * 2, True, "mine", True)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, mode="exp_range"),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def rates(scheduler):
    """Return the learning rates of a few steps, and the warnings."""
    optimizer, found = scheduler.optimizer, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Seems like `optimizer.step")  # as in a worker
        for _ in range(4):
            optimizer.step()
            scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            found.append(optimizer.param_groups[0]["lr"])
    return found, [str(each.message) for each in caught]


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers_drive_their_optimizer_without_a_warning(send, make):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    step, rate = vars(optimizer).get("step"), optimizer.param_groups[0]["lr"]

    def check(call):
        optimizer, scheduler = call
        return scheduler.optimizer is optimizer, *rates(scheduler)

    there = send((optimizer, scheduler), check)
    assert (vars(optimizer).get("step"), optimizer.param_groups[0]["lr"]) == (step, rate)
    assert there == (True, *rates(scheduler))


def test_group_that_a_scheduler_does_not_know_gets_no_initial_rate(send):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    lr_scheduler.StepLR(optimizer, 1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert send(optimizer, lambda it: ["initial_lr" in group for group in it.param_groups]) == [True, False]


# --- loaders ---


def test_loader_keeps_its_generator_and_its_samplers(send):
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.arange(10))
    loader = DataLoader(data, sampler=RandomSampler(data, generator=generator), generator=generator, batch_size=3)
    next(iter(loader))

    def check(loader):
        order = [each.tolist() for (each,) in loader]
        return order, loader.sampler.generator is loader.generator, loader.sampler.data_source is loader.dataset

    there = send(loader, check)
    assert there == ([each.tolist() for (each,) in loader], True, True)


def test_the_environment_and_torchs_own_generator_are_the_other_processes_own(send):
    own = [os.environ, torch.default_generator]
    assert send(own, lambda it: (it[0] is os.environ, it[1] is torch.default_generator)) == (True, True)


def test_live_workers_of_a_loader_stay_at_home(send):
    loader = DataLoader(TensorDataset(torch.arange(4)), num_workers=1, persistent_workers=True)
    expected = [each.tolist() for (each,) in loader]
    assert send(loader, lambda it: (it._iterator, it.num_workers, it.persistent_workers)) == (None, 1, True)
    assert [each.tolist() for (each,) in loader] == expected
    del loader
    gc.collect()


# --- functions, classes, runs ---


def plus_one(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) + 1

    return wrapper


@plus_one
@plus_one
def decorated(x):
    return x * 2


class Holder:
    @staticmethod
    @plus_one
    def decorated(x):
        return x * 3


def test_what_a_decorator_has_replaced_is_found_behind_it(send):
    def check(functions):
        raw, half, method = functions
        return raw is decorated.__wrapped__.__wrapped__, half is decorated.__wrapped__, method(1)

    raw = decorated.__wrapped__.__wrapped__
    assert send((raw, decorated.__wrapped__, Holder.decorated.__wrapped__), check) == (True, True, 3)


def test_function_that_wraps_a_compiled_one_is_itself(send):
    class Caller:
        def wrapped(self):
            compiled = torch.compile(lambda x: x + 1, backend="eager")
            return functools.wraps(compiled)(lambda x: (self.factor, compiled(x).item()))

        factor = 3

    assert send(Caller().wrapped(), lambda it: it(torch.tensor(1))) == (3, 2)


SCRIPT = """
import abc, dataclasses, enum, sys
from pathlib import Path
from typing import Generic, NamedTuple, TypedDict, TypeVar
import typing_extensions
import torch
from nano_loop import TorchNano, nano
from nano_loop.distributed.payload.payload import dump

factor = 3

class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * factor

class Nano(TorchNano):
    def train(self, model, x):
        return model(x).tolist()

class Outer:
    class Kind(enum.Enum):
        LINEAR = Model

    def double(x):
        return 2 * x

@dataclasses.dataclass(slots=True)
class Settings:
    width: int = 8

T = TypeVar("T")

class Box(Generic[T]):
    __slots__ = ("value",)

class Meta(type):
    pass

class Made(abc.ABC):
    __slots__ = ("value",)

class Own(metaclass=Meta):
    __slots__ = ("value",)

class Batch(NamedTuple):
    x: int
    factor: float = 2.0

    def product(self):
        return self.x * self.factor

class Pair(typing_extensions.NamedTuple):
    x: int

class Named(TypedDict):
    x: int

class Signs(torch.optim.Optimizer):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= 0.5 * parameter.grad.sign()

@nano(verbose=False)
def train(model, x):
    return model(x).tolist()

model, x = Model(2, 2), torch.ones(1, 2)
optimizer = Signs(model.parameters(), {})  # torch wraps the class's step
saved = [Settings, Box, Made, Own, Batch, Pair, Named, Model, Outer, Outer.Kind.LINEAR, Outer.double]
contents = train.__wrapped__, Nano(verbose=False), optimizer, (model, x), model(x).tolist(), saved
dump(contents, Path(sys.argv[1]), {})
"""


@pytest.mark.slow
def test_functions_and_classes_of_a_script_arrive_by_value_and_pickle_finds_them(team, tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "folder"
    script.write_text(SCRIPT)
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[3]}:{Path(__file__).parents[2]}"}
    subprocess.run([sys.executable, script, folder], env=environment, check=True)

    def check(ranks):
        train, runner, optimizer, arguments, expected, saved = load(folder)
        again = pickle.loads(pickle.dumps([*saved, arguments]))
        assert [*map(operator.is_, again, saved)] == [True] * len(saved)
        assert (saved[4](3).product(), saved[5](1), saved[6](x=1)) == (6.0, (1,), {"x": 1})
        assert again[-1][0](arguments[1]).tolist() == expected
        assert type(optimizer).step.__globals__ is vars(sys.modules["torch.optim.optimizer"])  # with all hooks
        return train(*arguments) == expected, runner.train(*arguments) == expected, isinstance(runner, TorchNano)

    assert team(2)(check) == [(True, True, True)] * 2


# --- objects that cannot be pickled ---


class Refusing:
    def __reduce_ex__(self, protocol):
        raise OSError("not this one")


class Kept:
    """Has a lock that its pickled state omits, and one that it includes."""

    def __init__(self):
        self.left_out = threading.Lock()
        self.inner = {"list": [1, threading.Lock()]}

    def __getstate__(self):
        return {"inner": self.inner}


def closing_over(lock):
    return lambda: lock


def with_default(lock):
    return lambda x=lock: x


def with_lock_in_a_layer():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].lock = threading.Lock()
    return model


def with_scripted_global():
    scope = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def of_script(): return lock", scope)
    return scope["of_script"]


LOCK = "is a _thread.lock and cannot be pickled (TypeError: cannot pickle '_thread.lock' object)"
CULPRITS = {
    "itself": (threading.Lock, f"argument `it` {LOCK}"),
    "closure": (lambda: closing_over(threading.Lock()), f"argument `it`, its closure variable `lock`, {LOCK}"),
    "global": (with_scripted_global, f"argument `it`, its global variable `lock`, {LOCK}"),
    "partial": (
        lambda: functools.partial(print, x=threading.Lock()),
        f"its attribute `keywords`, its item 'x', {LOCK}",
    ),
    "default": (lambda: with_default(threading.Lock()), f"its attribute `__defaults__`, its item 0, {LOCK}"),
    "state": (Kept, f"argument `it`, its attribute `inner`, its item 'list', its item 1, {LOCK}"),
    "method": (lambda: Kept().__getstate__, "argument `it`, its attribute `__self__`, its attribute `inner`"),
    "refusing": (Refusing, f"argument `it` is a {__name__}.Refusing and cannot be pickled (OSError: not this one)"),
    "generator": (lambda: (x for x in "a"), "argument `it` is a generator and cannot be pickled"),
    "model": (with_lock_in_a_layer, f"its attribute `_modules`, its item '0', its attribute `lock`, {LOCK}"),
}


@pytest.mark.parametrize(("make", "words"), CULPRITS.values(), ids=CULPRITS.keys())
def test_what_cannot_be_pickled_is_named_with_the_way_to_it(tmp_path, make, words):
    value = make()
    with pytest.raises(NanoError) as caught:
        dump(((1, value), {}), tmp_path, {"fine": torch.rand(2), "it": value})
    message = str(caught.value)
    assert words in message
    assert message.startswith("argument `it`")
    assert "every argument is sent to the worker processes by cloudpickle" in message
    assert "Create it inside train" in message
    assert isinstance(caught.value.__cause__, Exception)


def test_unpicklable_object_outside_the_arguments_is_found_in_the_call(tmp_path):
    with pytest.raises(NanoError, match=r"^the call, its item 0, its closure variable `lock`, is a _thread.lock"):
        dump((closing_over(threading.Lock()), (1,)), tmp_path, {"x": 1})


def test_nesting_without_end_is_told_of_the_argument(tmp_path):
    tree = []
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(NanoError, match=r"^argument `tree`.* is a list and cannot be pickled .*recursion"):
        dump(tree, tmp_path, {"tree": tree})
    while tree:  # deleting the whole tree would recurse, too
        tree = tree.pop()
