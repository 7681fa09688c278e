"""Autocast rounds a frozen weight only once if the graph keeps the rounded copy, and not otherwise."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop import disable_casts, nano
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.weight_copies import WeightCopies
from nano_loop.precision.autocast import frozen_weights
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.op_lists import OperatorLists
from nano_loop.steps.precision import Precision
from nano_loop.steps.products import Products

X = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A trained layer, followed by frozen layers of each kind."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.convolution = nn.Conv2d(4, 4, 1).requires_grad_(False)
        self.linear = nn.Linear(8, 8).requires_grad_(False)
        self.factor = nn.Parameter(torch.rand(8, 8), requires_grad=False)
        self.recomputes = False

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.frozen, x, use_reentrant=False) if self.recomputes else self.frozen(x)

    def frozen(self, x):
        return self.linear(self.convolution(x)) @ self.factor


@pytest.fixture
def made(monkeypatch):
    """Record the shapes of the copied weights."""
    monkeypatch.setattr(frozen_weights, "FEWEST", 10)
    shapes, make = [], WeightCopies.make

    def noted(self, weight):
        copy = make(self, weight)
        assert copy is not None
        shapes.append(tuple(weight.shape))
        return copy

    monkeypatch.setattr(WeightCopies, "make", noted)
    return shapes


ALL = [(4, 4, 1, 1), (8, 8), (8, 8)]


def set_up(step, model):
    made = step(Precision, precision="bf16")
    return made, made.apply(TrainingObjects([model]))


def trained(model, steps=3):
    for _ in range(steps):
        model(X).sum().backward()


def test_weights_are_rounded_once_for_all_steps(step, made):
    model = Net()
    _, line = set_up(step, model)
    trained(model)
    with torch.no_grad():
        model.eval()(X)
    assert sorted(made) == sorted(ALL)
    assert line.endswith("frozen weights of Net rounded once")


def only_evaluated(model):
    with torch.no_grad():
        for _ in range(3):
            model(X)


def without_a_trained_layer_before(model):
    model.first.requires_grad_(False)
    for _ in range(3):
        model(X)


def recomputed(model):
    model.recomputes = True
    trained(model)


def without_casts(model):
    with disable_casts():
        trained(model)


@pytest.mark.parametrize("use", [only_evaluated, without_a_trained_layer_before, recomputed, without_casts])
def test_no_copy_is_made_where_no_graph_would_keep_one(step, made, use):
    model = Net()
    set_up(step, model)
    use(model)
    assert made == []


def test_a_list_of_the_user_takes_precedence(step, made):
    model = Net()
    made_step, _ = set_up(step, model)
    lists = step(OperatorLists, precision="bf16", fp32_ops=["linear"])
    lists.interceptors = made_step.interceptors
    lists.apply(TrainingObjects([model]))
    seen = []
    model.linear.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    trained(model)
    assert set(seen) == {torch.float32}


class Integers(nn.Module):
    """A frozen layer in 8 bits, like those of bitsandbytes, with a custom class for its weight."""

    class Weight(nn.Parameter):
        pass

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.weight = self.Weight(torch.randint(-128, 127, (256, 256), dtype=torch.int8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(self.first(x), self.weight.to(torch.float32) / 128)


@pytest.mark.filterwarnings("ignore:.*this CPU has no bf16 instructions")
@pytest.mark.parametrize("precision", ["bf16", *(["auto"] if gives_kernels() else [])])
def test_integers_are_left_alone_and_the_report_says_so(step, precision):
    model = Integers()
    before = model.weight, model.weight.clone()
    made_step = step(Precision if precision == "bf16" else Products, precision=precision)
    line = made_step.apply(TrainingObjects([model]))
    model(torch.rand(64, 256)).sum().backward()
    assert "weights of Integers in int8 unchanged" in line
    assert model.weight is before[0]
    assert torch.equal(model.weight, before[1])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.12, where a graph breaks
def test_a_program_may_compile_the_model(made, compiles_anew):
    @nano(precision="bf16", verbose=False)
    def train(model):
        trained(model)
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            assert torch.allclose(compiled(X), model(X), atol=0.02)
            model.linear.weight.data.mul_(2)
        compiled(X).sum().backward()

    train(Net())
    assert made
