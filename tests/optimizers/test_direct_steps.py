"""An optimizer that is stepped directly computes bit for bit what torch's ``step()`` does, and calls the same hooks."""

from types import FunctionType

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nano_loop.optimizers.direct_steps import stepped_directly

KINDS = {
    "Adam": (Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW, maximized": (AdamW, {"lr": 0.01, "maximize": True}),
    "Adagrad": (Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}),
    "SGD": (SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD with momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD of Nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
}
OF_EACH_KIND = pytest.mark.parametrize(("kind", "settings"), KINDS.values(), ids=KINDS)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def build(kind, settings, parameters=None):
    return kind(model().parameters() if parameters is None else parameters, fused=True, **settings)


def fill(optimizer, seed, skip=()):
    """Set each parameter's gradient from a seed, except for the parameters to skip."""
    generator = torch.Generator().manual_seed(seed)
    for place, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
        gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = None if place in skip else gradient


def step(*optimizers, seed, skip=(), **settings):
    """Step the optimizers with the gradients of a seed, after changing settings of their first group."""
    for each in optimizers:
        fill(each, seed, skip)
        each.param_groups[0].update(settings)
        assert each.step() is None


def values(optimizer):
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            found += [parameter.detach(), *(each for each in state.values() if each is not None)]
    return [each.clone() for each in found]


def assert_equal(one, other):
    pairs = list(zip(values(one), values(other), strict=True))
    assert pairs
    assert all(torch.equal(*each) for each in pairs)


@pytest.fixture
def refused(monkeypatch):
    """Return a function that makes torch's own step of an optimizer class fail from now on."""

    def refuse(kind):
        def fails(*args, **kwargs):
            raise AssertionError("torch's own step was called")

        # As a function of torch's module, because a method of the program's is never skipped.
        monkeypatch.setattr(kind, "_init_group", FunctionType(fails.__code__, {"__name__": kind.__module__}))

    return refuse


def by_torch():
    """Assert that a block calls torch's own step, which fails."""
    return pytest.raises(AssertionError, match="torch's own step")


@OF_EACH_KIND
def test_steps_are_torchs_bit_for_bit_with_groups_missing_gradients_and_changing_settings(kind, settings, refused):
    def grouped():
        first, second = model()
        groups = [{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.5, "weight_decay": 0.0}]
        return build(kind, settings, groups)

    direct, plain = grouped(), grouped()
    steps = [{"seed": seed, "lr": 0.01 * (seed + 1)} for seed in range(7)]
    for place, skip in ((2, (1,)), (3, (2, 3)), (4, (0, 1, 2, 3))):
        steps[place]["skip"] = skip
    for each in steps[:-1]:
        step(plain, **each)
    with stepped_directly(direct):
        step(direct, **steps[0])  # torch's own step, which creates the state
        refused(kind)
        for each in steps[1:-1]:
            step(direct, **each)
    assert_equal(direct, plain)
    with by_torch():
        step(direct, **steps[-1])


@pytest.mark.parametrize(
    ("kind", "settings", "name", "becomes_0"),
    [
        (Adam, {"fused": True}, "exp_avg", True),
        (Adam, {"fused": True, "eps": 1e-20}, "exp_avg", False),  # it may matter compared with this epsilon
        (Adagrad, {"fused": True}, "sum", True),
        (SGD, {"fused": True, "momentum": 0.9}, "momentum_buffer", True),
    ],
)
def test_moments_that_are_denormal_become_0(kind, settings, name, becomes_0):
    parameters = [torch.randn(size, requires_grad=True) for size in (3, 1 << 18)]
    optimizer = kind(parameters, lr=1e-3, **settings)
    with stepped_directly(optimizer):
        step(optimizer, seed=0)
        for parameter in parameters:
            parameter.grad.zero_()
            optimizer.state[parameter][name].fill_(1e-39)
        optimizer.step()
    for parameter in parameters:
        moments = optimizer.state[parameter][name]
        assert moments.count_nonzero() == (0 if becomes_0 else moments.numel())
    assert torch.full((1 << 18,), 1e-39).mul(0.5).all()  # as before


@OF_EACH_KIND
def test_hooks_run_in_torchs_order_and_may_change_the_arguments(kind, settings):
    def run(optimizer):
        seen = []
        handles = [
            register_optimizer_step_pre_hook(lambda *given: seen.append(("all", len(given)))),
            register_optimizer_step_post_hook(lambda *given: seen.append(("all, after", given[1:]))),
            optimizer.register_step_pre_hook(lambda *given: seen.append(("one", len(given[1]), given[2]))),
            optimizer.register_step_post_hook(lambda *given: seen.append(("one, after", len(given[1]), given[2]))),
        ]
        try:
            for seed in range(2):
                fill(optimizer, seed)
                optimizer.step()
            handles.append(optimizer.register_step_pre_hook(lambda self, args, kwargs: ((self, lambda: 7), kwargs)))
            seen.append(optimizer.step())
            handles.append(optimizer.register_step_pre_hook(lambda *given: "nonsense"))
            with pytest.raises(RuntimeError, match=r"None or a tuple|None, or the new arguments"):
                optimizer.step()
        finally:
            for handle in handles:
                handle.remove()
        return [each if each == 7 else (each[0], len(each)) for each in seen]

    direct, plain = build(kind, settings), build(kind, settings)
    expected = run(plain)
    with stepped_directly(direct):
        assert run(direct) == expected
    assert 7 in expected
    assert_equal(direct, plain)


def test_profiler_sees_torchs_labels():
    direct = build(AdamW, {})
    with stepped_directly(direct):
        step(direct, seed=0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            direct.step()
            direct.zero_grad()
    names = {each.key for each in profile.key_averages()}
    assert {"Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad"} <= names
