"""Models and their blocks are compiled in place, and restored when the run ends."""

import copy
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from nano_loop import nano
from nano_loop.patching.torch_private_compiler import compiled_call
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.compile import Compile, arguments_with
from nano_loop.storage.cache_folder import inductor_folder

pytestmark = pytest.mark.usefixtures("nothing_compiled")


class Net(nn.Module):
    """A user-defined class, because torch does not compile a single layer of `torch.nn`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)


def counting_backend(calls):
    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    return backend


def test_second_setup_of_a_model_compiles_nothing_and_says_the_same(step):
    model = nn.Linear(3, 2)
    made = step(Compile, compile=True)
    assert made.apply(TrainingObjects([model])) == made.apply(TrainingObjects([model]))
    assert made.skip_reason(TrainingObjects([model])) is None


def test_what_the_user_compiled_stays_compiled(step):
    model = nn.Linear(3, 2)
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    made = step(Compile, compile=True)
    assert made.skip_reason(TrainingObjects([model])).code == "compiled"
    made.undo()
    assert model._compiled_call_impl is compiled


class Block(nn.Module):
    def __init__(self, width=3, channels=0):
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)
        self.mixing = nn.Conv2d(channels, channels, 1) if channels else None

    def forward(self, x):
        return torch.tanh(self.other(torch.tanh(self.one(x if self.mixing is None else self.mixing(x)))))


class Stacked(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(3, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks(count, **named):
    return [Block(**named) for _ in range(count)]


def test_each_kind_of_block_is_compiled_once(step):
    calls, x = [], torch.ones(2, 3, requires_grad=True)
    odd = Block()
    odd.one.bias = None
    model = Stacked(odd, *blocks(5))
    expected = model(x)
    made = step(Compile, compile={"backend": counting_backend(calls)})
    assert made.apply(TrainingObjects([model])) == "torch.compile, at the first call: 6 blocks of Block"
    torch.testing.assert_close(model(x), expected)
    assert len(calls) == 2
    assert all(compiled_call(block) for block in model.blocks)
    assert compiled_call(model) is None
    made.undo()
    assert not any(compiled_call(block) for block in model.blocks)


def test_blocks_of_many_sizes_are_not_too_many_for_torch(step, caplog):
    """torch compiles one code object up to eight times, and treats sizes of the same name as dynamic."""
    calls = []
    sizes = range(3, 15)
    models = [Stacked(*blocks(2, width=size)) for size in sizes]
    made = step(Compile, compile={"backend": counting_backend(calls), "fullgraph": True})
    made.apply(TrainingObjects(models))
    for size, model in zip(sizes, models, strict=True):
        model.blocks[1](model.blocks[0](torch.ones(2, size, requires_grad=True)))
    assert len(calls) == len(sizes)
    inputs = [node.meta["example_value"] for graph in calls for node in graph.graph.find_nodes(op="placeholder")]
    assert all(type(size) is int for tensor in inputs for size in tensor.shape)


def test_blocks_with_convolutions_are_compiled_once_with_channels_last():
    calls = []
    model = Stacked(*blocks(12, channels=2))

    @nano(channels_last=True, compile={"backend": counting_backend(calls)}, verbose=False)
    def train(model):
        model(torch.ones(2, 2, 3, 3)).square().mean().backward()

    train(model)
    assert len(calls) == 2  # the first block's input needs no gradient


def test_a_model_is_compiled_as_a_whole_if_asked_or_if_it_repeats_nothing(step):
    for model, value in ((Stacked(*blocks(3)), "whole"), (Stacked(Block(), Net()), True)):
        made = step(Compile, compile=value)
        assert made.apply(TrainingObjects([model])) == "torch.compile, at the first call: all of Stacked"
        assert compiled_call(model)
        assert not any(map(compiled_call, model.blocks))


def test_a_block_that_the_user_compiled_stays_theirs(step):
    model = Stacked(*blocks(3))
    model.blocks[1].compile(backend="eager")
    theirs = compiled_call(model.blocks[1])
    made = step(Compile, compile=True)
    made.apply(TrainingObjects([model]))
    assert compiled_call(model.blocks[1]) is theirs
    made.undo()
    assert [compiled_call(block) for block in model.blocks] == [None, theirs, None]


def test_copies_and_pickles_of_a_compiled_model_are_plain(step):
    model = Stacked(*blocks(2))
    keys = list(model.state_dict())
    step(Compile, compile={"backend": "eager"}).apply(TrainingObjects([model]))
    model(torch.ones(2, 3))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(map(compiled_call, other.modules()))
        assert list(other.state_dict()) == keys


@pytest.mark.parametrize("named", [None, "default", "named"])
def test_inductor_keeps_files_below_the_cache_folder_unless_the_user_has_named_another(
    step, monkeypatch, tmp_path, named
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {None: None, "default": inductor_folder(), "named": str(tmp_path / "named")}[named]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(before))
    if before is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    made = step(Compile, compile={"backend": "eager"})
    made.apply(TrainingObjects([Net()]))
    during = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert during == (before if named == "named" else str(tmp_path / "nano_loop/torchinductor"))
    made.undo()
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_cache_folder_that_another_user_can_change_is_not_inductors(step, monkeypatch, tmp_path):
    (tmp_path / "nano_loop").mkdir()
    (tmp_path / "nano_loop").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    made = step(Compile, compile={"backend": "eager"})
    made.apply(TrainingObjects([Net()]))
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent == Path(tempfile.gettempdir())
    assert str(folder) != inductor_folder()
    made.undo()
    assert not folder.exists()


WATCHED = """
import os, sys
import torch
from nano_loop import nano

def train(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

def watch(event, arguments):
    if is_in_run and any(str(argument).startswith(folder) for argument in arguments):
        print(event, arguments)

model, is_in_run, folder = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), False, sys.argv[1]
optimizer = torch.optim.SGD(model.parameters(), 0.1)  # with which torch makes the folder
sys.addaudithook(watch)
is_in_run = True
nano(compile=True, verbose=False)(train)(model, optimizer, torch.randn(4, 8))
is_in_run = False
print(*os.listdir(folder))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("has_home", [True, False])
def test_nothing_is_opened_or_made_in_the_folder_of_inductor_that_others_may_have_made(monkeypatch, tmp_path, has_home):
    """The folder has headers that each compilation would include."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" if has_home else "/dev/null/none"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = Path(inductor_folder())
    done = subprocess.run([sys.executable, "-c", WATCHED, folder], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
    assert any((tmp_path / "home/nano_loop/torchinductor").rglob("*.so")) == has_home
    assert {path.name for path in tmp_path.iterdir()} <= {"home", folder.name}


OURS = {"fallback_random": True, "cpp_cache_precompile_headers": False}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"fullgraph": True}, {"fullgraph": True, "options": OURS}),
        ({"mode": "default"}, {"options": OURS}),
        ({"options": {"fallback_random": False}}, {"options": {**OURS, "fallback_random": False}}),
        ({"options": {"max_autotune": True}}, {"options": {**OURS, "max_autotune": True}}),
        ({"backend": "aot_eager"}, {"backend": "aot_eager"}),
    ],
)
def test_inductor_draws_as_torch_does_and_the_users_arguments_prevail(given, expected):
    before = copy.deepcopy(given)
    assert arguments_with(given) == expected
    assert given == before


def test_a_mode_becomes_its_options():
    arguments = arguments_with({"mode": "max-autotune-no-cudagraphs"})
    assert arguments["options"]["max_autotune"]
    assert "mode" not in arguments
    torch.compile(torch.nn.Linear(1, 1), **arguments)
