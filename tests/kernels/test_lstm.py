"""Layers of LSTMs in C are as exact as oneDNN's, forward and backward, for any sizes and number of threads."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nano_loop.kernels.linear import product
from nano_loop.kernels.rnn import lstm_layer as module
from nano_loop.kernels.rnn.lstm_layer import Arguments, lstm

pytestmark = pytest.mark.skipif(module.KERNEL.unavailable is not None, reason=str(module.KERNEL.unavailable))


def layer(steps, batch, size, hidden, has_biases=True, is_reversed=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes, by=1.0):
        return (torch.randn(sizes, generator=generator) * by).bfloat16()

    by = hidden**-0.5
    biases = (normal(4 * hidden, by=by), normal(4 * hidden, by=by)) if has_biases else ()
    state = normal(batch, hidden, by=0.5), normal(batch, hidden, by=0.5)
    weights = normal(4 * hidden, size, by=by), normal(4 * hidden, hidden, by=by)
    return Arguments(normal(steps, batch, size), *weights, biases, *state, is_reversed)


def in_fp64(inputs, input_weight, hidden_weight, biases, output, cells, is_reversed):
    outputs = [None] * inputs.size(0)
    for step in reversed(range(len(outputs))) if is_reversed else range(len(outputs)):
        gates = inputs[step] @ input_weight.t() + output @ hidden_weight.t() + sum(biases)
        let_in, forget, cell, out = gates.chunk(4, 1)
        cells = forget.sigmoid() * cells + let_in.sigmoid() * cell.tanh()
        output = outputs[step] = out.sigmoid() * cells.tanh()
    return torch.stack(outputs), output, cells


def by_torch(inputs, input_weight, hidden_weight, biases, output, cells, is_reversed):
    numbers = is_reversed, [], 2, output.size(1), 1, bool(biases), False, False, True
    biases = biases or (input_weight.detach(), hidden_weight.detach())  # as torch calls it
    tensors = (inputs, input_weight, hidden_weight, *biases, output, cells)
    return torch.ops.aten.mkldnn_rnn_layer(*tensors, *numbers)[:3]


def results(compute, arguments, dtype=torch.bfloat16, used=(True, True, True), seed=1):
    """Return the outputs, and the gradients of all tensors, from random ones of the outputs that are used."""
    inputs, input_weight, hidden_weight, biases, *state, is_reversed = arguments
    leaves = [
        each.detach().to(dtype).requires_grad_() for each in (inputs, input_weight, hidden_weight, *biases, *state)
    ]
    biases = tuple(leaves[3:-2])
    outputs = compute(*leaves[:3], biases, *leaves[-2:], is_reversed)
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(each.shape, generator=generator).bfloat16().to(dtype) for each in outputs]
    some = [place for place in range(3) if used[place]]
    differentiated = [outputs[place] for place in some], leaves, [gradients[place] for place in some]
    return [*(each.detach() for each in outputs), *torch.autograd.grad(*differentiated)]


def ours(*arguments):
    return lstm(Arguments(*arguments))


def error(found, exact):
    return (found.double() - exact).square().mean().sqrt().item()


def assert_as_exact_as_torch(arguments, **how):
    exact = results(in_fp64, arguments, torch.float64, **how)
    torchs = results(by_torch, arguments, **how)
    found = results(ours, arguments, **how)
    assert len(found) == len(exact) == (10 if arguments.biases else 8)
    for mine, theirs, right in zip(found, torchs, exact, strict=True):
        assert mine.shape == right.shape
        assert mine.dtype is torch.bfloat16
        # Of few numbers, either rms is chance: one rounding more or less of the largest.
        allowed = 1.2 * error(theirs, right) + (0.002 * right.abs().max().item() if right.numel() < 500 else 0)
        assert error(mine, right) <= allowed
    return found


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 12),
    batch=st.integers(1, 20),
    size=st.integers(1, 150),
    hidden=st.integers(8, 75).map(lambda half: 2 * half),
    has_biases=st.booleans(),
    is_reversed=st.booleans(),
    seed=st.integers(0, 1000),
    are_cached=st.booleans(),
)
def test_any_sizes_are_as_exact_as_torch(are_cached, **sizes):
    with pytest.MonkeyPatch.context() as patch:
        if not are_cached:
            patch.setattr(module, "_CACHED", 0)
        assert_as_exact_as_torch(layer(**sizes))


@pytest.mark.parametrize(
    "used", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_outputs_without_a_gradient_count_as_zero(used):
    assert_as_exact_as_torch(layer(6, 9, 40, 48), used=used)


#: Inputs in the steps, few or many; and in one product before, with a last tile that is not full.
LARGE = [(20, 13, 7, 130), (9, 40, 256, 128), (12, 11, 300, 262)]


@pytest.mark.parametrize("sizes", LARGE, ids=str)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_same_bits_for_any_number_of_threads(threads, for_each_number, sizes, is_reversed):
    arguments = layer(*sizes, is_reversed=is_reversed)
    assert module._is_computed_in_steps(*sizes[2:]) == (sizes[2] < 300)
    threads(1)
    once = assert_as_exact_as_torch(arguments)
    for other in for_each_number(lambda: results(ours, arguments), 2, 3, 7):
        assert all(map(torch.equal, other, once))


def test_large_and_undefined_numbers_are_those_of_torch():
    arguments = layer(5, 6, 33, 16)
    huge = arguments._replace(inputs=arguments.inputs * 1e4)
    exact, found = results(in_fp64, huge, torch.float64), results(ours, huge)
    assert all(each.isfinite().all() for each in found)
    assert error(found[0], exact[0]) < 0.01
    for bad in (float("nan"), float("inf")):
        inputs = arguments.inputs.clone()
        inputs[2, 3, 4] = bad
        outputs = lstm(arguments._replace(inputs=inputs))[0]
        theirs = by_torch(*arguments._replace(inputs=inputs))[0]
        assert torch.equal(outputs.isnan(), theirs.isnan())
        assert outputs[:, :3].isfinite().all()


def test_small_numbers_keep_their_digits():
    tiny = [each * 1e-6 if isinstance(each, torch.Tensor) else each for each in layer(4, 8, 20, 32, has_biases=False)]
    arguments = Arguments(*tiny)
    exact, found = results(in_fp64, arguments, torch.float64), results(ours, arguments)
    assert error(found[0], exact[0]) < 0.01 * exact[0].square().mean().sqrt()


def test_gradients_that_are_not_needed_are_not_computed(monkeypatch):
    calls, original = [], product.product
    monkeypatch.setattr(product, "product", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    arguments = layer(6, 9, 40, 48)
    weight = arguments.hidden_weight.requires_grad_()
    outputs, _, _ = lstm(arguments)
    assert not calls  # few inputs are multiplied in the steps
    outputs.sum().backward()
    assert len(calls) == 1
    assert weight.grad is not None
    assert [each.grad for each in arguments.tensors if each is not weight] == [None] * 6


def test_output_that_nobody_differentiates_leaves_no_gradients():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    arguments = layer(6, 9, 40, 48)
    arguments.hidden_weight.requires_grad_()
    Nothing.apply(lstm(arguments)[0]).sum().backward()
    assert arguments.hidden_weight.grad is None


def test_graph_can_be_differentiated_again_and_while_a_mode_is_active():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.overloadpacket)
            return function(*args, **(kwargs or {}))

    seen, arguments = [], layer(6, 9, 40, 48)
    weights = arguments.input_weight.requires_grad_(), arguments.hidden_weight.requires_grad_()
    outputs = lstm(arguments)[0]
    once = torch.autograd.grad(outputs.sum(), weights, retain_graph=True)
    again = torch.autograd.grad(outputs.sum(), weights)
    with Mode():
        in_mode = lstm(arguments)[0]
    assert module.AS_OPERATOR in seen
    assert torch.equal(in_mode, outputs)
    for gradients in (again, torch.autograd.grad(in_mode.sum(), weights)):
        assert all(torch.equal(a, b) for a, b in zip(gradients, once, strict=True))


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("has_biases", [False, True])
def test_second_derivatives_are_right(is_reversed, has_biases):
    arguments = layer(5, 6, 20, 16, has_biases, is_reversed)

    def penalty(compute, dtype):
        leaves = [each.detach().to(dtype).requires_grad_() for each in arguments.tensors]
        inputs, input_weight, hidden_weight, *biases, output, cells = leaves
        biases = tuple(biases) if has_biases else ()
        outputs, _, last = compute(inputs, input_weight, hidden_weight, biases, output, cells, is_reversed)
        first = torch.autograd.grad(outputs.square().sum() + last.sum(), (inputs, cells), create_graph=True)
        of = [inputs, input_weight, hidden_weight, *biases, output, cells]
        return [*first, *torch.autograd.grad(sum(each.square().sum() for each in first), of)]

    pairs = zip(penalty(ours, torch.bfloat16), penalty(in_fp64, torch.float64), strict=True)
    assert all(error(found, exact) < 0.02 * exact.square().mean().sqrt() for found, exact in pairs)


@pytest.mark.slow
def test_fewer_threads_than_asked_for_compute_all_parts():
    """OpenMP gives what a limit leaves. torch's own bf16 products are wrong then, so this is compared by files."""
    code = (
        "import sys, torch; from nano_loop.kernels.rnn.lstm_layer import Arguments, lstm\n"
        "torch.set_num_threads(int(sys.argv[1])); torch.manual_seed(0)\n"
        "def normal(*sizes): return (torch.randn(sizes) / 8).bfloat16().requires_grad_()\n"
        "given = Arguments(normal(9, 20, 70), normal(512, 70), normal(512, 128), (normal(512), normal(512)),\n"
        "                  normal(20, 128), normal(20, 128), False)\n"
        "outputs, *state = lstm(given)\n"
        "found = torch.autograd.grad(outputs.sum(), given.tensors)\n"
        "print([each.float().double().sum().item() for each in (outputs, *state, *found)])\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code, str(count)],
            env={**os.environ, "OMP_THREAD_LIMIT": str(limit)},
            check=True,
            timeout=120,
            capture_output=True,
        ).stdout
        for count, limit in ((8, 2), (2, 2))
    ]
    assert len(printed[0]) > 100
    assert printed[0] == printed[1]
