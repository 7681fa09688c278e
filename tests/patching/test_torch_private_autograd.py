"""Private names of torch's autograd are still there, and do what is expected of them."""

import pytest
import torch

from nano_loop.patching import torch_private_autograd as private


def test_backwards_are_told_from_forwards_and_numbered():
    seen, x = [], torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append((private.in_backward(), private.graph_task())))
    x.sum().backward()
    x.sum().backward()
    assert (private.in_backward(), private.graph_task()) == (False, -1)
    assert [is_inside for is_inside, _ in seen] == [True, True]
    assert len({number for _, number in seen} - {-1}) == 2


def test_callback_runs_before_backward_returns_and_may_raise():
    seen, x = [], torch.ones(1, requires_grad=True)

    def callback():
        seen.append(x.grad.clone())
        raise ValueError("from the callback")

    x.register_hook(lambda gradient: private.queue_callback(callback))
    with pytest.raises(ValueError, match="from the callback"):
        x.sum().backward()
    assert seen == [torch.ones(1)]


def test_dict_of_hooks_goes_when_it_is_empty_and_only_then():
    x = torch.ones(1, requires_grad=True)
    assert x._post_accumulate_grad_hooks is None
    ours, users = (x.register_post_accumulate_grad_hook(lambda parameter: None) for _ in range(2))
    ours.remove()
    private.forget_empty_hooks(x)
    assert len(x._post_accumulate_grad_hooks) == 1
    users.remove()
    private.forget_empty_hooks(x)
    assert x._post_accumulate_grad_hooks is None


def test_hooks_of_tensors_are_called_so_and_seen():
    tensor = torch.ones(1, requires_grad=True)
    assert not private.has_tensor_hooks(tensor)
    assert [getattr(tensor, name) for name in private.TENSOR_HOOKS] == [None, None]
    tensor.register_hook(print)
    assert private.has_tensor_hooks(tensor)
    tensor.register_post_accumulate_grad_hook(print)
    assert [[*getattr(tensor, name).values()] for name in private.TENSOR_HOOKS] == [[print], [print]]


def test_autograd_nodes_are_numbered_as_they_are_made_and_known_in_their_backward():
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(private.current_node_number())
            return gradient

    x = torch.ones(1, requires_grad=True)
    first = private.next_node_number()
    out = Noting.apply(x)
    assert private.next_node_number() == first + 1
    assert private.current_node_number() is None
    out.backward()
    assert seen == [first]
    assert private.current_node_number() is None


def test_leaf_is_reached_by_the_backward_that_does_not_say_what_to_reach():
    seen = []
    weight, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    middle = weight * other
    middle.register_hook(lambda gradient: seen.append(private.reaches(middle.grad_fn.next_functions[1][0])))
    out = middle.sum()
    out.backward(retain_graph=True)
    assert seen == [True]
    for inputs in ([middle], [weight], [middle, weight]):
        torch.autograd.grad(out, inputs, retain_graph=True)
        out.backward(inputs=inputs, retain_graph=True)
    assert seen == [True, *[False] * 6]
