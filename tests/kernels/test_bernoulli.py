"""Masks have the right rate, are independent, and repeat with torch's generator."""

import threading

import numpy as np
import pytest
import torch

from nano_loop.kernels.bernoulli import _CHUNK as CHUNK
from nano_loop.kernels.bernoulli import WORTH_IT, Crew, bernoulli_

LARGE = 1 << 20
RATES = [0.1, 0.5, 0.9, 1 / 65536, 1 - 1 / 65536, 1 / 3]


@pytest.fixture(autouse=True)
def seeded():
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)


def mask(count=LARGE, p=0.5, **kwargs):
    return bernoulli_(torch.empty(count), p, **kwargs)


@pytest.mark.parametrize("p", RATES)
def test_rate_is_right_within_five_standard_errors(p):
    mean = np.mean([mask(p=p).double().mean().item() for _ in range(8)])
    assert abs(mean - p) < 5 * (p * (1 - p) / (8 * LARGE)) ** 0.5


@pytest.mark.parametrize("p", [0.3, 0.5, 0.9])
def test_pairs_of_neighbours_are_independent(p):
    """Chi-square over the eight patterns of three neighbours: 29.9 is its 0.0001 point with 7 degrees of freedom."""
    bits = mask(3 * (LARGE // 3), p).reshape(-1, 3).int()
    patterns = torch.bincount(bits[:, 0] * 4 + bits[:, 1] * 2 + bits[:, 2], minlength=8).double()
    ones = torch.tensor([bin(number).count("1") for number in range(8)])
    expected = len(bits) * p**ones * (1 - p) ** (3 - ones)
    assert ((patterns - expected) ** 2 / expected).sum() < 29.9


@pytest.mark.parametrize("lag", [1, 2, 4, 64, 1 << 18])
def test_elements_at_a_distance_are_uncorrelated(lag):
    bits = mask() - 0.5
    correlation = (bits[:-lag] * bits[lag:]).double().mean() / 0.25
    assert abs(correlation) < 5 / (LARGE - lag) ** 0.5


def test_calls_are_independent_of_each_other():
    correlation = ((mask() - 0.5) * (mask() - 0.5)).double().mean() / 0.25
    assert abs(correlation) < 5 / LARGE**0.5


def test_manual_seed_repeats_and_another_seed_does_not():
    torch.manual_seed(5)
    first, second = mask(), mask()
    torch.manual_seed(5)
    assert torch.equal(mask(), first)
    assert torch.equal(mask(), second)
    torch.manual_seed(6)
    assert not torch.equal(mask(), first)


def test_restored_generator_state_repeats_as_activation_checkpointing_needs():
    state = torch.get_rng_state()
    first = mask()
    torch.set_rng_state(state)
    assert torch.equal(mask(), first)


def test_generator_of_the_callers_is_used_and_the_default_one_is_not():
    before = torch.get_rng_state()
    first = mask(generator=torch.Generator().manual_seed(3))
    assert torch.equal(mask(generator=torch.Generator().manual_seed(3)), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def crew():
    """Threads to draw with, and torch's number of threads put back."""
    threads, made = torch.get_num_threads(), Crew()
    yield made
    made.close()
    torch.set_num_threads(threads)


def test_masks_do_not_depend_on_the_number_of_threads(crew):
    torch.manual_seed(1)
    alone = mask(5 * CHUNK + 7)
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        assert torch.equal(mask(5 * CHUNK + 7, spread=crew.spread), alone)


def test_threads_are_started_when_needed_and_ended(crew):
    before = threading.active_count()
    torch.set_num_threads(3)
    mask(CHUNK, spread=crew.spread)
    assert threading.active_count() == before
    mask(3 * CHUNK, spread=crew.spread)
    mask(3 * CHUNK, spread=crew.spread)
    assert threading.active_count() == before + 2
    crew.close()
    assert threading.active_count() == before


def test_a_thread_that_fails_is_heard_of(crew):
    torch.set_num_threads(2)

    def fail(number):
        if number == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crew.spread(fail, range(4))


@pytest.mark.parametrize("p", [0, 1, 0.0, 1.0])
def test_certain_outcomes_are_certain(p):
    assert mask(p=p).eq(p).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool])
def test_every_dtype_gets_the_same_zeros_and_ones(dtype):
    torch.manual_seed(2)
    expected = mask(WORTH_IT)
    torch.manual_seed(2)
    assert torch.equal(bernoulli_(torch.empty(WORTH_IT, dtype=dtype)).float(), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(256, 256).T,
        lambda: torch.empty(4, 8, 64, 64).to(memory_format=torch.channels_last),
        lambda: torch.empty(256, 512)[:, ::2],
        lambda: torch.empty(300, 300)[10:266, 5:261],
        lambda: torch.empty(1 << 17)[1 << 16 :],
    ],
)
def test_any_strides_are_filled_and_nothing_beside_them(make):
    tensor = make()
    base = tensor if tensor._base is None else tensor._base
    base.fill_(9)
    assert bernoulli_(tensor, 0.25) is tensor
    assert tensor.le(1).all()
    assert abs(tensor.mean() - 0.25) < 0.02
    assert base.eq(9).sum() == base.numel() - tensor.numel()


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_small_tensors_get_torchs_own_mask(p):
    torch.manual_seed(4)
    expected = torch.empty(100).bernoulli_(p)
    torch.manual_seed(4)
    assert torch.equal(bernoulli_(torch.empty(100), p), expected)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("count", [10, LARGE])
def test_impossible_rates_raise_what_torch_raises(p, count):
    with pytest.raises(RuntimeError):
        mask(count, p)
