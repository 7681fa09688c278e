"""Gradients and optimizer state follow the strides of their parameters."""

import copy
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from nano_loop.patching.objects.optimizers import guard_layout, is_dense, laid_out_as

OPTIMIZERS = {
    "Adam": lambda parameters, **kwargs: torch.optim.Adam(parameters, lr=0.01, **kwargs),
    "AdamW": lambda parameters, **kwargs: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, **kwargs),
    "SGD": lambda parameters, **kwargs: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **kwargs),
    "Adagrad": lambda parameters, **kwargs: torch.optim.Adagrad(parameters, lr=0.01, **kwargs),
}


def train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(2, 3, 6, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def conv(memory_format=torch.contiguous_format):
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3).to(memory_format=memory_format)


@pytest.fixture
def undoing():
    with ExitStack() as stack:
        yield stack


def resumed(build, undoing=None):
    """Train NCHW, and go on from its checkpoint with channels_last and a fused optimizer; return the weights."""
    model = conv()
    optimizer = build(model.parameters())
    train(model, optimizer, 3, seed=1)
    other = conv(torch.channels_last)
    other.load_state_dict(model.state_dict())
    fused = build(other.parameters(), fused=True)
    if undoing is not None:
        guard_layout(fused, undoing)
    saved = copy.deepcopy(optimizer.state_dict())  # torch shares the state that it loads
    saved["param_groups"] = fused.state_dict()["param_groups"]
    fused.load_state_dict(saved)
    train(other, fused, 3, seed=2)
    train(model, optimizer, 3, seed=2)
    return other.weight, model.weight


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_checkpoint_of_another_layout_is_resumed_right(build, undoing):
    accelerated, plain = resumed(build, undoing)
    torch.testing.assert_close(accelerated, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_without_the_guard_torch_is_silently_wrong(build):
    """If this fails, torch has mended its kernels, and the guard can go."""
    accelerated, plain = resumed(build)
    assert (accelerated - plain).abs().max() > 1e-4


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_gradient_that_the_loop_assigned_gets_the_strides_of_its_parameter(build, undoing):
    weights = []
    for fused in (True, False):
        model = conv(torch.channels_last if fused else torch.contiguous_format)
        optimizer = build(model.parameters(), fused=fused)
        if fused:
            guard_layout(optimizer, undoing)
        torch.manual_seed(1)
        for _ in range(3):
            model.weight.grad = torch.rand(4, 3, 3, 3)
            model.bias.grad = torch.rand(4)
            optimizer.step()
        weights.append(model.weight)
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_model_that_changes_its_layout_in_the_loop_takes_its_state_along(undoing):
    model, plain = conv(), conv()
    fused = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    guard_layout(fused, undoing)
    for each, optimizer in ((model, fused), (plain, reference)):
        train(each, optimizer, 2, seed=1)
        each.to(memory_format=torch.channels_last if each is model else torch.contiguous_format)
        train(each, optimizer, 2, seed=2)
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-5, atol=1e-6)


def test_state_dict_is_contiguous_and_the_state_is_not_changed_by_it(undoing):
    model = conv(torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    guard_layout(optimizer, undoing)
    train(model, optimizer, 1, seed=1)
    saved = optimizer.state_dict()["state"][0]["exp_avg"]
    live = optimizer.state[model.weight]["exp_avg"]
    assert saved.is_contiguous()
    assert live.stride() == model.weight.stride() != saved.stride()
    assert torch.equal(saved, live)


def test_guarding_twice_is_guarding_once_and_undoing_removes_the_hooks():
    optimizer = torch.optim.Adam(conv().parameters())
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_load_state_dict_post_hooks", "_optimizer_state_dict_post_hooks")
    with ExitStack() as stack:
        guard_layout(optimizer, stack)
        guard_layout(optimizer, stack)
        assert [len(getattr(optimizer, name)) for name in hooks] == [1, 1, 1]
    assert [len(getattr(optimizer, name)) for name in hooks] == [0, 0, 0]
    with ExitStack() as stack:  # and the optimizer may be guarded again
        guard_layout(optimizer, stack)
        assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_density():
    assert is_dense(torch.ones(2, 3).T)
    assert is_dense(torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last))
    assert not is_dense(torch.ones(3, 1).expand(3, 4))
    assert not is_dense(torch.ones(4, 4)[:, :2])


def test_laid_out_as_keeps_values_and_dtype():
    like = torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last)
    value = torch.rand(1, 3, 4, 4).double()
    moved = laid_out_as(like, value)
    assert torch.equal(moved, value)
    assert (moved.stride(), moved.dtype) == (like.stride(), torch.float64)
