"""Stochastic rounding to bf16: right in the mean, exact where bf16 is, the same for one seed."""

import pytest
import torch

from nano_loop.precision.autocast.rounding import _POOL, StochasticRounding


def rounded(tensor, seed=0):
    rounding = StochasticRounding(seed)
    rounding.renew()
    return rounding.round(tensor.clone(memory_format=torch.preserve_format))


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_mean_is_that_of_what_was_rounded(share, sign):
    low, high = 1.0, 1.0 + 2.0**-7  # neighbours in bf16
    value = sign * (low + share * (high - low))
    found = rounded(torch.full((3 * _POOL + 17,), value))
    assert set(found.unique().tolist()) == {sign * low, sign * high}
    up = (found == sign * high).double().mean().item()
    assert up == pytest.approx(share, abs=4 * (share * (1 - share) / _POOL) ** 0.5)


def test_what_bf16_can_represent_is_not_changed():
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    found = rounded(numbers.float())
    assert torch.equal(found.nan_to_num(0), numbers.nan_to_num(0))
    assert torch.equal(found.isnan(), numbers.isnan())
    assert torch.equal(found.isinf(), numbers.isinf())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3, 5, 7).contiguous(memory_format=torch.channels_last),
        torch.randn(6, 8).t(),
        torch.randn(6, 8)[:, ::2],
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(2 * _POOL + 5),
    ],
    ids=["channels_last", "transposed", "with gaps", "a number", "empty", "longer than the pool"],
)
def test_each_number_becomes_one_of_its_neighbours_in_any_layout(tensor):
    found = rounded(tensor)
    assert found.shape == tensor.shape
    assert found.dtype is torch.bfloat16
    error = (found.float() - tensor).abs()
    assert (error <= tensor.abs() * 2.0**-7).all()
    assert torch.equal(found, rounded(tensor))  # with one seed
    if tensor.is_contiguous() or tensor.dim() == 4:
        assert found.stride() == tensor.stride()


def test_seeds_and_steps_give_other_numbers_and_torch_s_generator_stays():
    before = torch.get_rng_state()
    values = torch.full((10_000,), 1.0 + 2.0**-8)
    rounding = StochasticRounding(1)
    rounding.renew()
    first = rounding.round(values.clone())
    rounding.renew()
    found = [first, rounding.round(values.clone()), rounded(values, seed=2)]
    for one in range(3):
        for other in range(one):
            assert 0.4 < (found[one] == found[other]).double().mean() < 0.6
    assert torch.equal(torch.get_rng_state(), before)
