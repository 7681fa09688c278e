"""Steps in C equal torch's fused kernels bitwise, with fp32 and split weights; bf16 moments have the right mean."""

import itertools

import pytest
import torch
from torch import nn

from nano_loop.optimizers.split import SplitWeights
from nano_loop.optimizers.split_steps import KERNEL, SplitSteps
from nano_loop.optimizers.torch_fused_steps import steps_fused

ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD


def settings_of_adam():
    for decay, amsgrad, maximize in itertools.product((0, 0.1), (False, True), (False, True)):
        for betas in ((0.9, 0.999), (0.3, 0.99)):  # torch computes the mean in two ways
            yield {"weight_decay": decay, "amsgrad": amsgrad, "maximize": maximize, "betas": betas, "eps": 1e-6}


def settings_of_sgd():
    for decay, maximize in itertools.product((0, 0.1), (False, True)):
        for momentum, dampening, nesterov in ((0, 0, False), (0.9, 0, False), (0.9, 0.5, False), (0.9, 0, True)):
            of_momentum = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
            yield {"weight_decay": decay, "maximize": maximize, **of_momentum}


CASES = [
    *((kind, {"lr": 0.01, **settings}) for kind in (ADAM, ADAMW) for settings in settings_of_adam()),
    *((SGD, {"lr": 0.01, **settings}) for settings in settings_of_sgd()),
    *((kind, {"lr": torch.tensor(0.01)}) for kind in (ADAM, ADAMW, SGD)),
]


def stepped(kind, settings, shape, weights, moments=torch.float32, seed=0, steps=4, lay=torch.clone):
    """Return an fp32 weight after some steps in C, and its states."""
    generator = torch.Generator().manual_seed(0)
    wide = lay(torch.randn(shape, generator=generator))
    weight = nn.Parameter(wide.clone() if weights is None else weights.narrowed(wide, [wide.data_ptr()]))
    optimizer = kind([weight], **settings)
    calls = KERNEL.calls
    with steps_fused(optimizer, SplitSteps(weights, moments, seed)):
        for step in range(steps):
            weight.grad = gradient(generator, shape, step, weights is not None).to(weight.dtype)
            optimizer.step()
    assert KERNEL.calls == calls + steps
    return weight.detach() if weights is None else weights.wide(weight.data), optimizer.state[weight]


def gradient(generator, shape, step, is_bf16):
    numbers = torch.randn(shape, generator=generator) * 10.0 ** (step - 2)
    return numbers.bfloat16().float() if is_bf16 else numbers


def by_torch(kind, settings, shape, is_bf16, steps=4, lay=torch.clone):
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(lay(torch.randn(shape, generator=generator)))
    optimizer = kind([weight], fused=True, **settings)
    for step in range(steps):
        weight.grad = lay(gradient(generator, shape, step, is_bf16))
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


@pytest.mark.parametrize("size", [15, 4096, 40_007])
@pytest.mark.parametrize("is_split", [False, True])
def test_bits_are_those_of_torch_s_fused_kernels(size, is_split):
    for kind, settings in CASES:
        weight, states = stepped(kind, settings, (size,), SplitWeights() if is_split else None)
        expected, of_torch = by_torch(kind, settings, (size,), is_split)
        assert torch.equal(weight, expected), (kind, settings)
        assert states.keys() == of_torch.keys()
        for name, value in of_torch.items():
            assert states[name] is value is None or torch.equal(states[name], value), (kind, settings, name)


def channels_last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", [ADAM, SGD])
@pytest.mark.parametrize("is_split", [False, True])
def test_gradients_and_states_may_lie_otherwise(kind, is_split):
    settings, shape = {"lr": 0.01} | ({"momentum": 0.9} if kind is SGD else {}), (4, 3, 5, 7)
    weights = SplitWeights() if is_split else None
    weight, states = stepped(kind, settings, shape, weights, lay=channels_last)
    expected, _ = by_torch(kind, settings, shape, is_split, lay=channels_last)
    assert torch.equal(weight, expected)
    assert {value.stride() for value in states.values() if value.dim()} == {weight.stride()}


@pytest.mark.parametrize("is_split", [False, True])
def test_bf16_moments_are_right_in_the_mean(is_split):
    settings = {"lr": 0.01, "amsgrad": True, "betas": (0.9, 0.99)}
    runs = [
        stepped(ADAMW, settings, (3001,), SplitWeights() if is_split else None, torch.bfloat16, seed)
        for seed in range(200)
    ]
    expected, of_torch = by_torch(ADAMW, settings, (3001,), is_split)
    for name in ("exp_avg", "exp_avg_sq"):
        assert {states[name].dtype for _, states in runs} == {torch.bfloat16}
        errors = torch.stack([states[name].double() / of_torch[name].double() - 1 for _, states in runs])
        assert 1e-4 < errors.abs().mean() < 2.0**-7
        assert errors.mean(0).abs().mean() < 3 * errors.std() / 200**0.5
        assert errors.mean().abs() < 5 * errors.std() / (200 * 3001) ** 0.5
    assert (torch.stack([weight for weight, _ in runs]) - expected).abs().mean() < 1e-3


def test_rounding_depends_on_seed_and_step_and_place_alone():
    before = torch.get_rng_state()
    once, again, other = (
        stepped(ADAM, {"lr": 0.01}, (50_000,), None, torch.bfloat16, seed)[1]["exp_avg"] for seed in (0, 0, 1)
    )
    assert torch.equal(once, again)
    assert 0.3 < (once == other).double().mean() < 0.7
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(once, stepped(ADAM, {"lr": 0.01}, (50_000,), None, torch.bfloat16, 0)[1]["exp_avg"])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), before)


def test_large_and_missing_numbers_stay_in_bf16_moments():
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.tensor([3.4e38, float("inf"), float("nan"), 0.0])
    optimizer = SGD([weight], 0.0, momentum=0.9)
    with steps_fused(optimizer, SplitSteps(None, torch.bfloat16, 0)):
        optimizer.step()
    found = optimizer.state[weight]["momentum_buffer"].float().tolist()
    assert found[0] == pytest.approx(3.39e38, rel=1e-2)
    assert found[1] == float("inf")
    assert found[2] != found[2]
    assert found[3] == 0


def test_moments_that_vanish_are_zero_and_weights_may_be_denormal():
    weight = nn.Parameter(torch.tensor([2.0**-140, 1.0]))
    optimizer = ADAM([weight], 0.0)
    optimizer.state[weight] = {
        "step": torch.tensor(9.0),
        "exp_avg": torch.full((2,), 2.0**-126),
        "exp_avg_sq": torch.zeros(2),
    }
    weight.grad = torch.zeros(2)
    with steps_fused(optimizer, SplitSteps(None, torch.float32, 0)):
        optimizer.step()
    assert optimizer.state[weight]["exp_avg"].tolist() == [0, 0]
    assert weight.tolist() == [2.0**-140, 1.0]
