"""A kernel of torch's is replaced temporarily."""

import subprocess
import sys
import textwrap

import pytest
import torch

from nano_loop.patching import operators
from nano_loop.patching.operators import (
    AUTOCAST,
    gives_kernels,
    overridden,
    overridden_together,
    plainly,
    ruled,
)

gets_kernels = pytest.mark.skipif(not gives_kernels(), reason="torch does not hand out its kernels")


def plus_ten(original):
    return lambda keys, tensor, *args, **kwargs: original(keys, tensor, *args, **kwargs).add_(10)


def drawn():
    return torch.empty(3).bernoulli_(0.5)


def is_plain():
    return drawn().max() <= 1


@gets_kernels
def test_it_stays_until_the_last_user_has_left_and_torchs_kernel_is_taken_once():
    """Of two runs in two threads, the first may end first."""
    first = overridden("bernoulli_.float", plus_ten, "CPU")
    second = overridden("bernoulli_.float", plus_ten, "CPU")
    first.__enter__()
    second.__enter__()
    assert drawn().min() >= 10
    assert drawn().max() <= 11
    first.__exit__(None, None, None)
    assert drawn().min() >= 10
    second.__exit__(None, None, None)
    assert is_plain()


def test_first_override_of_a_process_warns_of_nothing():
    script = """
        import torch
        from nano_loop.patching.operators import overridden, plainly
        with overridden("bernoulli_.float", plainly(lambda tensor, *args, **kwargs: tensor.fill_(7)), "CPU"):
            print(torch.empty(1).bernoulli_(0.5).item())
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert (run.stdout, run.stderr) == ("7.0\n", "")


def under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        return torch.ones(2).tan()


def returning(number):
    return lambda keys, tensor: torch.full_like(tensor, number)


def test_functions_of_several_runs_stand_at_one_operator_and_leave_in_any_order():
    before = under_autocast()
    contexts = [overridden_together(each, lambda each=each: {"tan": returning(each)}, AUTOCAST) for each in (1.0, 2.0)]
    for context in contexts:
        context.__enter__()
    assert under_autocast().tolist() == [2.0, 2.0]
    with ruled(frozenset({"tan"}), lambda *_: None):  # it makes room for rules, but computes nothing here
        assert under_autocast().tolist() == [2.0, 2.0]
    contexts[0].__exit__(None, None, None)
    assert under_autocast().tolist() == [2.0, 2.0]
    contexts[1].__exit__(None, None, None)
    assert torch.equal(under_autocast(), before)


def test_call_that_torch_has_sent_before_the_last_function_left_is_computed():
    with overridden_together("late", lambda: {"tan": returning(3.0)}, AUTOCAST):
        site = operators._sites["tan"]
    assert site(None, torch.ones(2)).tolist() == [3.0, 3.0]


def test_function_is_not_traced_where_a_graph_breaks_at_a_recurrent_layer():
    calls, traced = [], []

    def by_cosine(tensor):
        calls.append(tensor.shape)
        return tensor.copy_(torch.cos(tensor))

    def backend(graph, inputs):
        traced.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    layer, x = torch.nn.GRU(3, 3), torch.ones(2, 1, 3)
    torch.compiler.reset()
    with overridden("tanh_", plainly(by_cosine), "CPU"):
        expected, _ = layer(x)
        found, _ = torch.compile(lambda: layer(x), backend=backend)()
    torch.compiler.reset()
    assert torch.equal(found, expected)
    assert len(calls) == 4  # two steps of each
    assert torch.cos not in traced


@gets_kernels
def test_what_was_compiled_in_a_run_leaves_no_kernel_for_what_is_compiled_after_it():
    """torch's Python dispatcher caches its look-ups. Without the fix, the gradient is None, and torch warns."""
    logits, target = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 1])

    def gradient():
        torch.compiler.reset()
        loss = torch.compile(lambda x: torch.nn.functional.cross_entropy(x, target), backend="aot_eager")(logits)
        return torch.autograd.grad(loss, logits)[0]

    with overridden("cross_entropy_loss", lambda original: original, "AutogradCPU"):
        expected = gradient()
    torch.testing.assert_close(gradient(), expected, rtol=0, atol=0)
