"""Chains of linear layers in C have the numbers of torch's layers, as near to fp64, with any number of threads."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop.kernels import build
from nano_loop.kernels.linear import chain
from nano_loop.kernels.linear.chain import Chain
from nano_loop.kernels.linear.chain_layers import Activation, ChainLayer, Norm

SEEDS = 25
ACTIVATIONS = {
    "none": nn.Identity(),
    "relu": nn.ReLU(),
    "leaky relu": nn.LeakyReLU(0.1),
    "elu": nn.ELU(0.7),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "silu": nn.SiLU(),
}
WIDTHS, ROWS = (9, 70, 33, 3), 53

pytestmark = pytest.mark.skipif(chain.KERNEL.unavailable is not None, reason=str(chain.KERNEL.unavailable))


NORMS = {"no norm": lambda size: nn.Identity(), "batch norm": nn.BatchNorm1d, "layer norm": nn.LayerNorm}


def layers(activation, dropout=0.0, widths=WIDTHS, norm=nn.Identity, biases=True):
    """Return a chain whose last layer has no activation."""
    kinds = [Activation.of(activation) or Activation()] * (len(widths) - 2) + [Activation()]
    norms = [Norm.of(norm(size), size) or Norm() for size in widths[1:]]
    pairs = itertools.pairwise(widths)
    return Chain(
        tuple(ChainLayer(*pair, biases, *kind, dropout) for pair, *kind in zip(pairs, norms, kinds, strict=True))
    )


def tensors(seed=0, widths=WIDTHS, rows=ROWS, biases=True, norms=False):
    """Return the input, the parameters, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, widths[0], generator=generator)
    parameters = []
    for inputs, outputs in itertools.pairwise(widths):
        parameters.append(torch.randn(outputs, inputs, generator=generator) * inputs**-0.5)
        parameters += [torch.randn(outputs, generator=generator) for _ in range(biases)]
        parameters += [torch.rand(outputs, generator=generator) + 0.5 for _ in range(2 * norms)]
    return x, parameters, torch.randn(rows, widths[-1], generator=generator)


def results(compute, x, parameters, gradient, masks, dtype=torch.float32):
    """Return the output, and the gradients of all inputs."""
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (x, *parameters)]
    out = compute(leaves[0], leaves[1:], [mask.to(dtype) for mask in masks])
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient.to(dtype))]


def errors(found, exact):
    return torch.stack([(a - b).square().mean() / b.square().mean() for a, b in zip(found, exact, strict=True)])


@pytest.mark.parametrize(
    ("name", "dropout", "norm"),
    [
        *itertools.product(ACTIVATIONS, (0.0, 0.25), ("no norm",)),
        # Not of ReLU behind a layer norm: its gradient jumps where rounding moves a number past 0.
        *(("relu", 0.25, "batch norm"), ("silu", 0.25, "batch norm"), ("silu", 0.25, "layer norm")),
    ],
)
def test_results_are_as_near_to_fp64_as_torchs(name, dropout, norm):
    # A layer norm of few numbers divides by nearly nothing in some rows, whose errors would be most of the sum.
    widths = WIDTHS if norm == "no norm" else (*WIDTHS[:-1], 30)
    own = layers(ACTIVATIONS[name], dropout, widths, norm=NORMS[norm])
    ours, torchs = 0, 0
    for seed in range(SEEDS):
        of_seed = tensors(seed, widths, norms=norm != "no norm")
        torch.manual_seed(seed)
        masks = own.masks((ROWS,))
        exact = results(own.by_operators, *of_seed, masks, torch.float64)
        ours = ours + errors(results(own.computed, *of_seed, masks), exact)
        torchs = torchs + errors(results(own.by_operators, *of_seed, masks), exact)
    # Without AVX-512 a sum has half as many parts as torch's, and rounds more.
    most = 1.0 if build.level().name != "v3" else 1.1
    ratios = (ours / torchs).sqrt()
    assert (ratios <= most).all(), ratios.tolist()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_number_is_activated_as_by_torch(name):
    numbers = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([0.0, 1e-30, -1e-30, 1e30, -1e30])])
    own = Chain([ChainLayer(1, 1, has_bias=False, activation=Activation.of(ACTIVATIONS[name]) or Activation())])
    x, one = numbers.unsqueeze(1), torch.ones(1, 1)
    found = results(own.computed, x, [one], torch.ones_like(x), [])
    exact = results(own.by_operators, x, [one], torch.ones_like(x), [], torch.float64)
    for a, b in zip(found[:2], exact[:2], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=1e-7)


def test_numbers_that_are_none_stay_none():
    own = layers(nn.ReLU())
    x, parameters, gradient = tensors()
    x[7, 2] = float("nan")
    found = results(own.computed, x, parameters, gradient, [])
    assert torch.equal(found[0].isnan(), (torch.arange(ROWS) == 7).unsqueeze(1).expand(-1, WIDTHS[-1]))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("widths", [(1, 1), (16, 64, 64, 64, 5), (300, 17, 2, 129), (64, 1, 64)])
@pytest.mark.parametrize("rows", [2, 6, 230])
def test_results_do_not_depend_on_the_number_of_threads(for_each_number, widths, rows, norm):
    biases = widths[0] != 16
    own = layers(nn.Tanh(), widths=widths, norm=NORMS[norm], biases=biases)
    of_call = tensors(0, widths, rows, biases, norms=norm != "no norm")
    one, *others = for_each_number(lambda: results(own.computed, *of_call, []), 1, 2, 3)
    for other in others:
        assert all(map(torch.equal, one, other))
    if norm == "no norm":  # that of one number, or of two rows, is rounding
        exact = results(own.by_operators, *of_call, [], torch.float64)
        for a, b in zip(one, exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_masks_are_those_of_torchs_dropouts():
    own = layers(nn.ReLU(), 0.3)
    x, parameters, _ = tensors()
    torch.manual_seed(3)
    found = own.computed(x, parameters, own.masks(x.shape[:-1]))
    state = torch.get_rng_state()
    torch.manual_seed(3)
    expected = x
    for at in range(3):
        expected = F.linear(expected, *parameters[2 * at : 2 * at + 2])
        expected = F.dropout(expected if at == 2 else expected.relu(), 0.3)
    torch.testing.assert_close(found, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_running_statistics_are_those_of_torchs_batch_norm():
    own, norm = layers(nn.ReLU(), widths=(9, 70), norm=nn.BatchNorm1d), nn.BatchNorm1d(70)
    x, parameters, _ = tensors(widths=(9, 70), norms=True)
    statistics = torch.zeros(70), torch.ones(70)
    for _ in range(3):
        own.computed(x, parameters, [], [statistics])
        norm(F.linear(x, *parameters[:2]))
    torch.testing.assert_close(statistics, (norm.running_mean, norm.running_var))
    assert all(tensor._version == 3 for tensor in statistics)


def test_gradients_of_gradients_and_many_gradients_at_a_time_are_torchs():
    own = layers(nn.Tanh())
    x, parameters, _ = (value for value in tensors())
    leaves = [tensor.requires_grad_() for tensor in (x, *parameters)]

    def penalty(compute):
        (of_x,) = torch.autograd.grad(compute(x, parameters).sum(), x, create_graph=True)
        return torch.autograd.grad(of_x.square().sum(), leaves[1:], materialize_grads=True)

    def batched(compute):
        out, many = compute(x, parameters), torch.eye(3).unsqueeze(1).expand(-1, ROWS, -1)
        return torch.autograd.grad(out, leaves, many, is_grads_batched=True)

    for computed in (penalty, batched):
        for a, b in zip(computed(own.computed), computed(own.by_operators), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_tensor_that_is_overwritten_before_the_backward_is_an_error():
    own = layers(nn.Tanh())
    x, parameters, gradient = tensors()
    parameters = [tensor.requires_grad_() for tensor in parameters]
    out = own.computed(x, parameters)
    with torch.no_grad():
        parameters[2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(gradient)


def test_saved_tensors_that_come_back_in_another_dtype_are_refused():
    own = layers(nn.Tanh())
    x, parameters, gradient = tensors()
    parameters = [tensor.requires_grad_() for tensor in parameters]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.double(), lambda tensor: tensor):
        out = own.computed(x, parameters)
    with pytest.raises(RuntimeError, match="was replaced between the forward and the backward"):
        out.backward(gradient)
