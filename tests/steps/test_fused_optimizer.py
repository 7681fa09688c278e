"""Optimizers that have fused CPU kernels use them; the rest, and what the user chose, stays."""

import copy

import pytest
import torch
from loops.wrappers import WRAPPERS
from torch import nn
from watched import FusedCalls

from nano_loop.optimizers.fused_steps import is_fused
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.fused_optimizer import FusedOptimizer

SWITCHED = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}


def parts(optimizer_of, model=None, **kwargs):
    model = model or nn.Linear(3, 2)
    return TrainingObjects([model], [optimizer_of(model.parameters(), lr=0.1, **kwargs)])


def flags(optimizer):
    return [(group["fused"], group["foreach"]) for group in optimizer.param_groups]


def kernels(optimizer):
    """Return the fused kernels that a step calls, for each of the groups that one steps."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    with FusedCalls() as calls:
        optimizer.step()
    return calls.names


@pytest.mark.parametrize("kind", SWITCHED.values(), ids=SWITCHED)
def test_kernel_is_switched_on_and_off_again(step, kind):
    given = parts(kind)
    made = step(FusedOptimizer)
    assert made.apply(given) == kind.__name__
    for _ in range(2):
        assert kernels(given.optimizers[0]) == [f"_fused_{kind.__name__.lower()}_"]
        assert flags(given.optimizers[0]) == [(None, None)]
    made.undo()
    assert kernels(given.optimizers[0]) == []


class OwnStep(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda p: torch.optim.ASGD(p), "no_kernel"),
        (lambda p: torch.optim.LBFGS(p), "no_kernel"),
        (lambda p: torch.optim.RMSprop(p), "no_kernel"),
        (lambda p: torch.optim.NAdam(p), "no_kernel"),
        (lambda p: torch.optim.RAdam(p), "no_kernel"),
        (lambda p: torch.optim.Adamax(p), "no_kernel"),
        (lambda p: torch.optim.Adadelta(p), "no_kernel"),
        (lambda p: torch.optim.Rprop(p), "no_kernel"),
        (lambda p: torch.optim.Adam(p, foreach=True), "users_flag"),
        (lambda p: torch.optim.Adam(p, fused=False), "users_flag"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "differentiable"),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), "differentiable"),
        (lambda p: torch.optim.Adam([nn.Parameter(torch.ones(2, dtype=torch.complex64))]), "complex"),
        (lambda p: OwnStep(p), "own_step"),
    ],
)
def test_what_cannot_or_shall_not_be_switched_is_skipped_with_the_reason(step, make, code):
    model = nn.Linear(3, 2)
    assert step(FusedOptimizer).skip_reason(TrainingObjects([model], [make(model.parameters())])).code == code


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_optimizer_inside_a_wrapper_is_switched(step, make):
    given = TrainingObjects(optimizers=[make(list(nn.Linear(3, 2).parameters()))])
    name = step(FusedOptimizer).apply(given)
    assert name in ("SGD", "AdamW")
    assert kernels(given.optimizers[0]) == [f"_fused_{name.lower()}_"]


def test_sparse_embeddings_are_a_reason(step):
    given = parts(torch.optim.SGD, nn.Embedding(4, 2, sparse=True))
    assert step(FusedOptimizer).skip_reason(given).code == "sparse"


def plainly(optimizer, backward):
    optimizer.zero_grad()
    backward()
    optimizer.step()


def by_closure(optimizer, backward):
    def closure():
        optimizer.zero_grad()
        return backward()

    optimizer.step(closure)


STEPS = pytest.mark.parametrize("take_step", [plainly, by_closure])


@STEPS
def test_sparse_gradient_that_nobody_could_foresee_is_stepped_by_torch(step, take_step):
    weight = nn.Parameter(torch.rand(4, 2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    before = weight.detach().clone()
    step(FusedOptimizer).apply(TrainingObjects(optimizers=[optimizer]))
    rows = torch.tensor([1, 3])
    take_step(optimizer, lambda: nn.functional.embedding(rows, weight, sparse=True).sum().backward())
    expected = before.index_add(0, rows, torch.ones(2, 2), alpha=-0.5)
    torch.testing.assert_close(weight.detach(), expected)
    assert flags(optimizer) == [(None, None)]


@STEPS
def test_gradient_in_another_layout_than_its_parameter_is_read_as_it_lies(step, take_step):
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    step(FusedOptimizer).apply(TrainingObjects(optimizers=[optimizer]))
    gradient = torch.arange(6.0).view(3, 2).t()

    def backward():
        weight.grad = gradient

    take_step(optimizer, backward)
    assert torch.equal(weight.detach(), -gradient)


def lay_out_gradient(weight):
    weight.grad = weight.grad.t().contiguous().t()


def lay_out_parameter(weight):
    weight.data = weight.data.t().contiguous().t()


def lay_out_both(weight):
    lay_out_gradient(weight)
    lay_out_parameter(weight)


@pytest.mark.parametrize("change", [lay_out_gradient, lay_out_parameter, lay_out_both])
@pytest.mark.parametrize("settings", [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})], ids=str)
def test_layout_that_changes_in_the_course_of_the_training_changes_no_number(step, settings, change):
    kind, options = settings
    weight, plain = (nn.Parameter(torch.arange(6.0).view(2, 3)) for _ in range(2))
    optimizer, other = kind([weight], lr=0.1, **options), kind([plain], lr=0.1, foreach=False, **options)
    step(FusedOptimizer).apply(TrainingObjects(optimizers=[optimizer]))
    for number in range(6):
        weight.grad = torch.arange(6.0).sub(number).view(2, 3)
        plain.grad = weight.grad.clone()
        if number in (2, 3, 5):
            change(weight)
        optimizer.step()
        other.step()
    assert is_fused(optimizer)
    torch.testing.assert_close(weight.detach(), plain.detach())


@STEPS
@pytest.mark.parametrize("dampening", [0, 0.3])
def test_layer_thawed_after_the_first_step_starts_its_momentum_as_in_the_plain_loop(step, dampening, take_step):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    twin, x = copy.deepcopy(model), torch.rand(5, 3)
    given = parts(torch.optim.SGD, model, momentum=0.9, dampening=dampening, weight_decay=0.01)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, dampening=dampening, weight_decay=0.01)
    step(FusedOptimizer).apply(given)
    for each, optimizer in ((model, given.optimizers[0]), (twin, plain)):
        each[0].requires_grad_(False)
        for thawed in (False, True, True):
            each[0].requires_grad_(thawed)
            take_step(optimizer, lambda each=each: each(x).square().sum().backward())
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "options", "converted"), [(torch.optim.SGD, {"momentum": 0.9}, 2), (torch.optim.Adagrad, {}, 0)]
)
def test_model_converted_after_its_optimizer_has_a_state_trains_as_in_the_plain_loop(step, kind, options, converted):
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.rand(5, 3)
    twin = copy.deepcopy(model)
    given, plain = parts(kind, model, **options), parts(kind, twin, **options).optimizers[0]
    step(FusedOptimizer).apply(given)
    for each, optimizer in ((model, given.optimizers[0]), (twin, plain)):
        for number in range(4):
            if number == converted:
                each.double()
            optimizer.zero_grad()
            each(x.to(each.weight.dtype)).square().sum().backward()
            optimizer.step()
    assert flags(given.optimizers[0]) == [(None, None)]
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-5, atol=1e-6)


def test_groups_are_switched_one_by_one(step):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "foreach": True}], lr=0.1)
    step(FusedOptimizer).apply(TrainingObjects([model], [optimizer]))
    assert kernels(optimizer) == ["_fused_sgd_"]
    assert flags(optimizer) == [(None, None), (None, True)]


def test_checkpoint_shows_the_users_flags_and_steps_are_fused_after_loading_one(step):
    given = parts(torch.optim.Adam)
    (optimizer,) = given.optimizers
    made = step(FusedOptimizer)
    made.apply(given)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["fused"] is None
    optimizer.load_state_dict(saved)
    assert kernels(optimizer) == ["_fused_adam_"]
    made.undo()
    assert kernels(optimizer) == []


def test_a_loaded_choice_of_the_user_is_kept(step):
    given = parts(torch.optim.Adam)
    (optimizer,) = given.optimizers
    made = step(FusedOptimizer)
    made.apply(given)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["foreach"] = True
    optimizer.load_state_dict(saved)
    assert flags(optimizer) == [(None, True)]
    assert kernels(optimizer) == []


def test_double_precision_step_counters_of_a_checkpoint_fit_the_kernel(step):
    given = parts(torch.optim.Adam)
    (optimizer,) = given.optimizers
    given.models[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] = state["step"].double()
    step(FusedOptimizer).apply(given)
    optimizer.step()
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


def test_switching_twice_in_a_run_is_switching_once(step):
    given = parts(torch.optim.Adam)
    made = step(FusedOptimizer)
    assert made.apply(given) == made.apply(given) == "Adam"
    assert made.skip_reason(given) is None
    made.undo()
    assert kernels(given.optimizers[0]) == []


def test_some_switched_and_some_not_are_both_said(step):
    model = nn.Linear(2, 2)
    both = TrainingObjects([model], [torch.optim.Adam(model.parameters()), torch.optim.ASGD(model.parameters())])
    assert step(FusedOptimizer).apply(both) == "Adam; ASGD has no fused CPU kernel"


def test_optimizer_is_as_before_while_it_is_fused(step):
    given = parts(torch.optim.SGD)
    (optimizer,) = given.optimizers
    before = {name: copy.copy(value) for name, value in vars(optimizer).items()}
    made = step(FusedOptimizer)
    made.apply(given)
    assert vars(optimizer) == before
    kernels(optimizer)
    assert vars(optimizer).keys() == before.keys()
    made.undo()


@pytest.mark.parametrize(
    ("value", "asked", "required"), [("auto", True, False), (True, True, True), (False, False, False)]
)
def test_option_says_whether_it_is_asked_for_and_required(step, value, asked, required):
    made = step(FusedOptimizer, fused_optimizer=value)
    assert (made.enabled, made.required) == (asked, required)
