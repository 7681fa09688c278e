"""Flattened states of optimizers keep the entries of runs, and load in a run and in a plain loop."""

import importlib
import sys
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states

from nano_loop.patching.objects import checkpoint_entries
from nano_loop.patching.objects.checkpoint_entries import RAMP, flattened_states_complete, pop_entry, with_entries
from nano_loop.patching.torch_private import FLATTENED_STATES

FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True)
ENTRIES = {RAMP: 7}


def of_run(function, model, optimizers, *args):
    """Call a function as a run does that has an entry in the states of optimizers."""
    steps = dict.fromkeys(optimizers, 0)

    def load(optimizer):
        steps[optimizer] = pop_entry(optimizer, RAMP) or 0

    with ExitStack() as undoing:
        undoing.enter_context(flattened_states_complete())
        for optimizer in optimizers:
            saving = optimizer.register_state_dict_post_hook(lambda one, state: with_entries(state, {RAMP: steps[one]}))
            undoing.callback(saving.remove)
            undoing.callback(optimizer.register_load_state_dict_post_hook(load).remove)
        return function(model, optimizers, *args)


@pytest.fixture
def objects():
    def make(kind=torch.optim.AdamW):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        return model, [kind(layer.parameters(), 0.1) for layer in model]

    return make


def trained(model, optimizers):
    (model(torch.ones(2, 3)).mean() / 256).backward()
    for optimizer in optimizers:
        optimizer.step()


def flattened(model, optimizers):
    return states.get_optimizer_state_dict(model, optimizers, options=FLAT)


def load(model, optimizers, state):
    states.set_optimizer_state_dict(model, optimizers, state, options=FLAT)
    return entries(optimizers)


def entries(optimizers):
    groups = [optimizer.state_dict()["param_groups"][0] for optimizer in optimizers]
    return [{key: group[key] for key in ENTRIES if key in group} for group in groups]


def saved(model, optimizers):
    """Return the flattened state of optimizers whose entry is known."""
    trained(model, optimizers)
    for optimizer in optimizers:
        state = optimizer.state_dict()
        state["param_groups"][0].update(ENTRIES)
        optimizer.load_state_dict(state)
    return flattened(model, optimizers)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_flattened_state_of_a_run_loads_in_a_run_and_in_a_plain_loop(objects, kind):
    state = of_run(saved, *objects(kind))
    assert of_run(load, *objects(kind), state) == [ENTRIES] * 2
    model, optimizers = objects(kind)
    assert load(model, optimizers, state) == [{}] * 2
    trained(model, optimizers)


def test_flattened_state_of_a_plain_loop_loads_in_a_run(objects):
    plain = objects()
    trained(*plain)
    model, optimizers = objects()
    loaded = of_run(load, model, optimizers, flattened(*plain))
    assert [entry.keys() for entry in loaded] == [ENTRIES.keys()] * 2
    assert next(iter(optimizers[0].state.values()))["step"] == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_checkpoint_of_files_keeps_the_entries(objects, tmp_path):
    def write(model, optimizers):
        checkpoint.save({"optimizers": saved(model, optimizers)}, checkpoint_id=tmp_path, no_dist=True)

    def read(model, optimizers):
        state = {"optimizers": flattened(model, optimizers)}
        checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
        return load(model, optimizers, state["optimizers"])

    of_run(write, *objects())
    assert of_run(read, *objects()) == [ENTRIES] * 2


def test_module_that_is_imported_during_the_run_is_changed_too(monkeypatch):
    name, function = FLATTENED_STATES
    monkeypatch.setattr(checkpoint, "state_dict", states)
    monkeypatch.delitem(sys.modules, name)
    finders = [*sys.meta_path]
    with checkpoint_entries.flattened_states_complete():
        module = importlib.import_module(name)
        inside = getattr(module, function)
    assert inside.__module__ == checkpoint_entries.__name__
    assert getattr(module, function).__module__ == name
    assert sys.meta_path == finders
