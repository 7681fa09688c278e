"""Split weights are bitwise fp32 values, and values that others write to them have no remainder."""

import gc

import pytest
import torch
from torch import nn

from nano_loop.optimizers.split import _PIECE, SplitWeights
from nano_loop.optimizers.split_steps import SplitSteps
from nano_loop.optimizers.torch_fused_steps import steps_fused

FIRST, LAST = 0x7F7E8000, 0x7F7EFFFF  # values that would be rounded up to the largest finite bf16 value
SPECIAL = [
    *(0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x7FFFFF, 0x800000),  # zero and subnormals
    *(0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F80FFFF),  # ties and neighbours
    *(FIRST - 1, LAST + 1, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF),  # the largest; the last two round to infinity
    *(0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF),  # infinity and NaN
]


def numbers():
    """Return the bits of values of all kinds, with both signs."""
    positive = torch.cat([torch.tensor(SPECIAL), torch.randint(0, 1 << 31, (200_000,))])
    positive = positive[(positive < FIRST) | (positive > LAST)]
    return torch.cat([positive, positive - (1 << 31)]).to(torch.int32)


def by_c(bits):
    """Return split weights after a step with a rate of zero, which joins, computes with, and splits them."""
    split, weight = SplitWeights(), nn.Parameter(torch.zeros(len(bits), dtype=torch.bfloat16))
    split.write(weight.data, bits.view(torch.float32))
    optimizer = torch.optim.SGD([weight], 0.0)
    weight.grad = torch.zeros_like(weight)
    before = weight.detach().view(torch.int16).clone()
    with steps_fused(optimizer, SplitSteps(split, torch.float32, 0)):
        optimizer.step()
    is_number = ~weight.detach().isnan()
    assert torch.equal(weight.detach().view(torch.int16)[is_number], before[is_number])
    return split.wide(weight.data)


def test_halves_are_the_number_to_the_bit_and_the_upper_is_the_nearest():
    bits, split = numbers(), SplitWeights()
    wide, weights = bits.view(torch.float32), torch.empty(len(bits), dtype=torch.bfloat16)
    split.write(weights, wide)
    assert torch.equal(split.wide(weights).view(torch.int32), bits)
    size, uppers = bits.long() & 0x7FFFFFFF, weights.view(torch.int16).long() & 0x7FFF
    nearest = torch.where(size < 0x7F7F8000, size + 0x8000, size) >> 16  # ties round away from zero
    assert torch.equal(uppers, nearest)
    assert torch.equal(weights.signbit(), wide.signbit())
    assert torch.equal(weights.isinf(), wide.isinf() | ((size > 0x7F800000) & (size < 0x7F810000)))


def test_what_would_be_rounded_up_to_the_largest_number_becomes_the_one_before():
    bits, split = torch.tensor([FIRST, LAST], dtype=torch.int32), SplitWeights()
    weights = torch.empty(2, dtype=torch.bfloat16)
    split.write(weights, bits.view(torch.float32))
    assert split.wide(weights).view(torch.int32).tolist() == [FIRST - 1] * 2
    assert by_c(bits).view(torch.int32).tolist() == [FIRST - 1] * 2


def test_steps_in_c_have_the_same_halves():
    bits = numbers()
    found, expected = by_c(bits), bits.view(torch.float32)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.view(torch.int32)[~expected.isnan()], bits[~expected.isnan()])


LAYOUTS = {
    "channels_last": lambda: torch.randn(4, 3, 5, 7).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(6, 8).t(),
    "with gaps": lambda: torch.randn(6, 8)[:, ::2],
    "a number": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "in several pieces": lambda: torch.randn(_PIECE + 1030),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_weights_may_lie_in_any_order(make):
    wide, split = make(), SplitWeights()
    narrow = split.narrowed(wide, [wide.data_ptr()])
    assert torch.equal(split.wide(narrow), wide)
    lying = torch.empty_strided(wide.shape, wide.stride(), dtype=torch.bfloat16)
    split.write(lying, wide.contiguous())
    assert torch.equal(split.wide(lying), wide)


WRITES = {
    "in place": lambda weight: weight.mul_(2),
    "by data": lambda weight: weight.data.clamp_(-0.5, 0.5),
    "by numpy": lambda weight: weight.detach().view(torch.int16).numpy().__imul__(0),
    "by a view": lambda weight: weight.detach().view(-1)[3:5].fill_(0),
    "data replaced": lambda weight: setattr(weight, "data", weight.detach() * 2),
    "set_": lambda weight: weight.set_((weight * 2).detach()),
    "foreach": lambda weight: torch._foreach_mul_([weight.data], 2.0),
    "two swapped": lambda weight: weight.copy_(weight.flip(0)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@torch.no_grad()
def test_what_others_write_has_no_rest(write):
    wide, split = torch.randn(100), SplitWeights()
    weight = nn.Parameter(split.narrowed(wide, [wide.data_ptr()]))
    assert torch.equal(split.wide(weight.data), wide)
    write(weight)
    assert torch.equal(split.wide(weight.data), weight.float())


@torch.no_grad()
def test_what_is_written_elsewhere_or_was_there_before_keeps_its_rest():
    wide, split = torch.randn(5000), SplitWeights()
    weight = nn.Parameter(split.narrowed(wide, [wide.data_ptr()]))
    saved = weight.clone()
    weight.zero_()
    weight.copy_(saved)  # as when a mean of weights is evaluated in between
    assert torch.equal(split.wide(weight.data), wide)
    weight[4999] = 0
    found = split.wide(weight.data)
    assert torch.equal(found[:4608], wide[:4608])
    assert torch.equal(found[4608:], weight[4608:].float())


def test_rests_are_freed_after_the_weights():
    split = SplitWeights()
    for _ in range(200):
        wide = torch.randn(64)
        narrow = split.narrowed(wide, [wide.data_ptr()])
    del narrow
    gc.collect()
    assert len(split._rests) < 40
