"""Tells when a name that torch keeps for itself is gone."""

import pytest
import torch
from torch import nn

from nano_loop.mechanisms.torch_private import (
    forget_compiled,
    forget_empty_hooks,
    forget_fused_check,
    fused_check_pending,
    graph_task,
    in_backward,
    in_functorch,
    is_compiled,
    is_loss,
    queue_callback,
    softmax_backward,
    version,
)


def test_compiled_models_are_told_from_others():
    model = nn.Linear(2, 2)
    assert not is_compiled(model)
    assert is_compiled(torch.compile(model, backend="eager"))
    model.compile(backend="eager")
    assert is_compiled(model)


def test_compiling_can_be_taken_back():
    model = nn.Linear(2, 2)
    before = dict(vars(model))
    model.compile(backend="eager")
    forget_compiled(model)
    assert not is_compiled(model)
    assert vars(model).keys() - before.keys() <= {"_compiled_call_impl"}


def test_backward_is_told_from_forward():
    seen, x = [], torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(in_backward()))
    x.sum().backward()
    assert (seen, in_backward()) == ([True], False)


def test_backwards_are_numbered():
    seen, x = [], torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(graph_task()))
    x.sum().backward()
    x.sum().backward()
    assert graph_task() == -1
    assert -1 not in seen
    assert len(set(seen)) == 2


def test_callback_runs_before_backward_returns_and_may_raise():
    seen, x = [], torch.ones(1, requires_grad=True)

    def callback():
        seen.append(x.grad.clone())
        raise ValueError("from the callback")

    x.register_hook(lambda gradient: queue_callback(callback))
    with pytest.raises(ValueError, match="from the callback"):
        x.sum().backward()
    assert seen == [torch.ones(1)]


def test_dict_of_hooks_goes_when_it_is_empty_and_only_then():
    x = torch.ones(1, requires_grad=True)
    assert x._post_accumulate_grad_hooks is None
    ours, users = (x.register_post_accumulate_grad_hook(lambda parameter: None) for _ in range(2))
    ours.remove()
    forget_empty_hooks(x)
    assert len(x._post_accumulate_grad_hooks) == 1
    users.remove()
    forget_empty_hooks(x)
    assert x._post_accumulate_grad_hooks is None


def test_transforms_are_told_from_plain_calls():
    seen = []
    torch.func.grad(lambda x: seen.append(in_functorch()) or x.sum())(torch.ones(1))
    assert (seen, in_functorch()) == ([True], False)


def test_changes_in_place_are_counted_outside_of_inference_mode():
    tensor = torch.ones(1)
    before = version(tensor)
    tensor.add_(1)
    assert version(tensor) == before + 1
    with torch.inference_mode():
        assert version(torch.ones(1)) == 0


def test_gradient_of_a_softmax_is_autograds():
    x = torch.rand(2, 5, requires_grad=True)
    gradient = torch.rand(2, 5)
    (expected,) = torch.autograd.grad(x.softmax(-1), x, gradient)
    torch.testing.assert_close(softmax_backward(gradient, x.softmax(-1).detach()), expected)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_first_fused_step_leaves_a_mark_that_can_be_removed(kind):
    weight = nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.1)
    before = set(vars(optimizer))
    assert fused_check_pending(optimizer)
    optimizer.param_groups[0]["fused"] = True
    weight.sum().backward()
    optimizer.step()
    assert not fused_check_pending(optimizer)
    forget_fused_check(optimizer)
    assert set(vars(optimizer)) == before


def test_losses_are_told_from_models():
    assert is_loss(nn.CrossEntropyLoss())
    assert is_loss(nn.MSELoss())
    assert is_loss(nn.TripletMarginLoss())
    assert not is_loss(nn.ReLU())
