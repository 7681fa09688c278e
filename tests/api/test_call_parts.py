"""The parts that a decorated function uses are found: in arguments, attributes of self, and surrounding variables."""

import argparse
import copy
import functools
import sys
import types

import pytest
import torch
from distributed import small
from torch import nn
from torch.utils.data import DataLoader, Dataset
from watched import is_fused, seeded  # noqa: F401 - a fixture

from nano_loop import NanoConfigError, nano
from nano_loop.api.call_parts import parts_in, variables_around

quiet = nano(verbose=False)


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


class State:
    """A plain user-defined object."""

    def __init__(self, **values):
        vars(self).update(values)


class Slotted:
    __slots__ = ("empty", "model")

    def __init__(self, model):
        self.model = model


class Samples(Dataset):
    """A user-defined dataset with its own model."""

    def __init__(self):
        self.encoder = nn.Linear(2, 2)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(2) * index


class Trainer:
    """Trains with the structure that most projects have."""

    def __init__(self):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.loader = DataLoader(Samples(), 2)
        self.history, self.best, self.epoch = [], {}, 0

    def train(self, epochs=2):
        for _ in range(epochs):
            self.history.append([step(self.model, self.optimizer, x) for x in self.loader])
            self.epoch += 1
            self.best["loss"] = self.history[-1][-1]
        return is_fused(self.optimizer)

    @property
    def raises(self):
        raise AssertionError("properties are not read")


class Fast(Trainer):
    train = quiet(Trainer.train)


class FastOfTwo(Trainer):
    train = nano(**small.OPTIONS)(Trainer.train)


class FastExact(Trainer):
    train = nano(verbose=False, exact=True)(Trainer.train)


def test_trainer_s_method_trains_what_self_holds():
    torch.manual_seed(0)
    plain, exact, fast = Trainer(), FastExact(), Fast()
    for each in (exact, fast):
        each.model.load_state_dict(plain.model.state_dict())
    assert (plain.train(), exact.train(), fast.train()) == (False, False, True)
    assert fast.train.report["fast_fetch"].status == "skipped" or "fast_fetch" in fast.train.report.applied
    assert exact.history == plain.history
    assert torch.equal(exact.model.weight, plain.model.weight)
    torch.testing.assert_close(fast.model.weight, plain.model.weight)
    assert not is_fused(fast.optimizer)


@pytest.mark.usefixtures("nothing_left")
def test_trainer_s_method_in_two_processes_leaves_what_rank_0_has_made_on_the_caller_s_objects():
    torch.manual_seed(0)
    two, one = FastOfTwo(), Trainer()
    one.model.load_state_dict(two.model.state_dict())
    one.loader = DataLoader(Samples(), 4)
    model, history, parameter = two.model, two.history, two.model.weight
    assert (two.train(), one.train()) == (True, False)
    assert two.model is model
    assert two.history is history
    assert two.model.weight is parameter
    torch.testing.assert_close(two.model.weight, one.model.weight)
    momenta = [
        each.state[each.param_groups[0]["params"][0]]["momentum_buffer"] for each in (two.optimizer, one.optimizer)
    ]
    torch.testing.assert_close(*momenta)
    assert [len(epoch) for epoch in two.history] == [2, 2]
    assert (two.epoch, two.best["loss"]) == (2, two.history[-1][-1])


def ids(parts):
    return {id(each) for each in (*parts.models, *parts.optimizers, *parts.loaders)}


def test_attributes_are_looked_through_as_deep_as_projects_nest_them():
    trainer = Trainer()
    parts = {id(trainer.model), id(trainer.optimizer), id(trainer.loader)}
    nested = State(parts={"all": [State(model=trainer.model, optimizer=trainer.optimizer)]}, loader=trainer.loader)
    nested.itself = nested
    for owner in (
        nested,
        State(
            args=argparse.Namespace(m=trainer.model),
            more=types.SimpleNamespace(rest=(trainer.optimizer, trainer.loader)),
        ),
        State(slotted=Slotted(trainer.model), optimizer=trainer.optimizer, loaders={trainer.loader}),
    ):
        assert ids(parts_in({}, owner)) == parts


def test_what_is_not_the_loop_s_is_left_alone():
    model = nn.Linear(1, 1)
    assert parts_in({}, State(loss=nn.MSELoss())) is None, "a loss without parameters"
    assert parts_in({}, State(data=Samples())) is None, "a dataset's own model"
    assert parts_in({}, State(samples=[model] * 2000)) is None, "a list of samples"
    assert parts_in({}, State(a=State(b=State(c=State(d=State(model=model)))))) is None, "too deep"
    assert parts_in({}, State(kind=Trainer, call=functools.partial(step, model))) is None, "classes and functions"
    assert parts_in({"self": model}, model).models == [model]


def test_bound_method_trains_what_its_object_holds():
    trainer = Trainer()
    assert quiet(trainer.train)(epochs=1)
    assert len(trainer.history) == 1


def test_argument_and_attribute_are_set_up_together():
    class Partial(Trainer):
        @quiet
        def fit(self, model):
            return model is self.model, is_fused(self.optimizer)

    trainer = Partial()
    assert trainer.fit(trainer.model) == (True, True)


net = nn.Linear(2, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
batches = DataLoader(torch.ones(8, 2), 2)
unused = nn.Linear(3, 1)
rebound = None


def helper(x):
    return step(net, opt, x), is_fused(opt)


def over_globals(epoch):
    return [helper(x)[1] for x in batches]


def builds_a_global():
    global rebound
    rebound = nn.Linear(1, 1)
    return rebound


def test_variables_that_the_function_and_its_helpers_name_are_found():
    assert variables_around(over_globals) == {"net": net, "opt": opt, "batches": batches}
    assert variables_around(builds_a_global) == {}
    assert quiet(over_globals)(1) == [True] * 4
    assert not is_fused(opt)


def test_variables_are_not_looked_up_if_there_is_a_model_among_the_arguments():
    @quiet
    def train(model):
        return is_fused(opt)

    assert train(nn.Linear(1, 1)) is False


SCRIPT = f"""
import torch
from nano_loop import nano

net = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
batches = torch.utils.data.DataLoader(torch.rand(16, 2), 2, shuffle=True)

def helper(x):
    opt.zero_grad()
    net(x).square().mean().backward()
    opt.step()

@nano(num_processes=2, auto_lr=False, verbose=False, cpu_for_each_process={small.cores()})
def train(epoch):
    for x in batches:
        helper(x)
    return len(batches)
"""


@pytest.mark.usefixtures("nothing_left")
def test_globals_of_a_module_that_workers_import_anew_are_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "of_a_module.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("of_a_module")
    before = copy.deepcopy(module.net.state_dict())
    with pytest.raises(NanoConfigError) as caught:
        module.train(1)
    assert str(caught.value) == (
        "train(epoch) uses the global variables batches, opt, net: worker processes import of_a_module again, and "
        "would train different objects. Pass them as arguments: def train(epoch, batches, opt, net)."
    )
    assert module.net.state_dict().keys() == before.keys()
    monkeypatch.setenv("NANO_LOOP_NUM_PROCESSES", "1")
    monkeypatch.setenv("NANO_LOOP_CPU_FOR_EACH_PROCESS", "none")
    assert module.train(1) == 8, "one process has the module's own objects"
    del sys.modules["of_a_module"]
