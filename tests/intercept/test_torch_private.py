"""Tells when a name that torch keeps for itself is gone."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nano_loop.intercept.torch_private import (
    TENSOR_HOOKS,
    bytes_of,
    compile_call,
    compile_context,
    compiled_call,
    current_node_number,
    forget_compiled,
    forget_empty_hooks,
    forget_fused_check,
    fused_check_pending,
    graph_task,
    in_backward,
    in_functorch,
    is_compiled,
    is_loss,
    is_watched_by_scheduler,
    kept_iterator,
    next_node_number,
    own_iterator,
    queue_callback,
    softmax_backward,
    stop_kept_workers,
    uncompiled,
    version,
    without_kept_iterator,
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


def test_hooks_of_tensors_are_called_so():
    tensor = torch.ones(1, requires_grad=True)
    assert [getattr(tensor, name) for name in TENSOR_HOOKS] == [None, None]
    tensor.register_hook(print)
    tensor.register_post_accumulate_grad_hook(print)
    assert [[*getattr(tensor, name).values()] for name in TENSOR_HOOKS] == [[print], [print]]


def test_loader_keeps_its_iterator_and_ends_its_workers():
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    assert kept_iterator(loader) is None
    assert [int(each) for each in loader] == [1, 2]
    iterator = kept_iterator(loader)
    assert iterator is not None
    assert own_iterator(loader) == {"_iterator": iterator}
    assert without_kept_iterator(vars(loader)) == {**vars(loader), "_iterator": None}
    (process,) = torch.multiprocessing.active_children()
    stop_kept_workers(loader)
    assert kept_iterator(loader) is None
    process.join(10)
    assert process.exitcode is not None


def test_step_that_a_scheduler_watches_is_told_from_others():
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    assert not is_watched_by_scheduler(optimizer.step)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert is_watched_by_scheduler(vars(optimizer)["step"])


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_bytes_of_a_typed_storage_are_its_memory():
    tensor = torch.arange(3.0)
    assert bytes_of(tensor.storage()).data_ptr() == tensor.data_ptr()


def test_compiled_functions_are_found_and_compiled_again():
    def double(x):
        return 2 * x

    compiled = torch.compile(double, backend="eager")
    assert compile_context(double) is None
    assert uncompiled(compiled) is double
    assert compile_context(compiled)(double)(torch.ones(1)) == 2


def test_call_of_a_module_is_compiled_by_the_context_of_another():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert compiled_call(one) is None
    one.compile(backend="eager")
    compile_call(other, compile_context(compiled_call(one)))
    assert is_compiled(other)
    assert other(torch.ones(1, 1)).shape == (1, 1)


def test_autograd_nodes_are_numbered_as_they_are_made_and_known_in_their_backward():
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(current_node_number())
            return gradient

    x = torch.ones(1, requires_grad=True)
    first = next_node_number()
    out = Noting.apply(x)
    assert next_node_number() == first + 1
    assert current_node_number() is None
    out.backward()
    assert seen == [first]
    assert current_node_number() is None
