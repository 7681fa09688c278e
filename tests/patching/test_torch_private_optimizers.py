"""Tells when a name that `torch.optim` keeps for itself is gone."""

import sys
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nano_loop.patching import torch_private_optimizers as private


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW])
def test_step_hands_the_lists_that_it_has_made_of_a_group_to_the_function_of_its_kind(kind, monkeypatch):
    module, name = sys.modules[kind.step.__module__], kind.__name__.lower().removesuffix("w")
    made, stepped = [], []

    def noting(original):
        def prepare(self, group, *lists):
            made.append((self, group, lists))
            return original(self, group, *lists)

        return prepare

    monkeypatch.setattr(module, name, lambda *lists, **settings: stepped.append((lists, settings)))
    weight = nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.1)
    weight.sum().backward()
    with private.groups_prepared(kind, noting):
        optimizer.step()
    assert made[0][0] is optimizer
    assert made[0][1] is optimizer.param_groups[0]
    (lists, settings), (_, _, prepared) = stepped[0], made[0]
    assert len(lists) == len(prepared)
    assert all(one is other for one, other in zip(lists, prepared, strict=True))
    assert lists[0] == [weight]
    assert {"fused", "foreach", "grad_scale", "found_inf"} <= settings.keys()


def test_step_of_an_optimizer_can_be_taken_apart():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    first, last, of_all = Mock(return_value=None), Mock(), Mock()
    handles = [
        optimizer.register_step_pre_hook(first),
        optimizer.register_step_post_hook(last),
        register_optimizer_step_pre_hook(of_all),
    ]
    assert list(private.hooks_before_step(optimizer)) == [of_all, first]
    assert list(private.hooks_after_step(optimizer)) == [last]
    weight.grad = torch.ones(3)
    body = private.unhooked_step(torch.optim.SGD.step)
    body(optimizer)
    for handle in handles:
        handle.remove()
    assert torch.equal(weight.detach(), torch.full((3,), 0.5))
    assert not first.called
    assert not last.called
    assert private.unhooked_step(body) is None
    assert private.unhooked_step(lambda self: None) is None


def test_running_profiler_is_seen():
    assert not private.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.is_profiling()
    assert not private.is_profiling()


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_fused_kernels_are_those_of_the_optimizers(is_decoupled):
    kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    weight = nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1, weight_decay=0.1, fused=True)
    weight.grad = torch.tensor([1.0, -2.0, 0.0])
    ours, mean, square, counter = torch.ones(3), torch.zeros(3), torch.zeros(3), torch.tensor(0.0)
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
    for _ in range(2):
        optimizer.step()
        private.foreach_increment([counter])
        private.fused_adam([ours], [weight.grad], [mean], [square], [counter], is_decoupled=is_decoupled, **numbers)
    assert torch.equal(ours, weight.detach())
    assert torch.equal(counter, torch.tensor(2.0))
    momentum = torch.ones(3)
    numbers = {"lr": 0.5, "momentum": 0.5, "weight_decay": 0, "dampening": 0, "nesterov": False, "maximize": False}
    ours = torch.ones(3)
    private.fused_sgd([ours], [torch.ones(3)], [momentum], **numbers)
    assert torch.equal(momentum, torch.full((3,), 1.5))
    assert torch.equal(ours, torch.full((3,), 0.25))


def test_hooks_of_optimizers_come_with_their_init():
    class Bare(torch.optim.Optimizer):
        def __init__(self):
            pass

    assert private.has_hooks(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    assert not private.has_hooks(Bare())


def test_step_that_a_scheduler_watches_is_told_from_others():
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    assert not private.is_watched_by_scheduler(optimizer.step)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert private.is_watched_by_scheduler(vars(optimizer)["step"])


def test_sparse_adam_steps_as_its_class_does():
    weight, ours = nn.Parameter(torch.ones(3, 2)), torch.ones(3, 2)
    optimizer = torch.optim.SparseAdam([weight], lr=0.1)
    mean, square = torch.zeros(3, 2), torch.zeros(3, 2)
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "maximize": False}
    weight.grad = torch.sparse_coo_tensor([[0, 2, 2]], torch.tensor([[1.0, -2.0]] * 3), (3, 2), check_invariants=True)
    for count in (1, 2):
        optimizer.step()
        private.sparse_adam([ours], [weight.grad], [mean], [square], [count], **numbers)
    assert torch.equal(ours, weight.detach())
