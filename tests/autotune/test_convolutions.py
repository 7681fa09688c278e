"""Gradients of convolutions are computed by the plan that is the fastest for their shape, and stay right by each."""

import time

import pytest
import torch
import torch.nn.functional as F

from autotune.time_for import ALWAYS, TimeFor
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.convolutions import chooser
from nano_loop.autotune.tuner import Tuner
from nano_loop.kernels.convolution import convolution, weight_gradient
from nano_loop.kernels.convolution.convolution import Arguments, Plan, faster_backward, first_guess, plans

NHWC = torch.channels_last


def arguments(
    images=4, channels=8, outputs=8, groups=1, transposed=False, mask=(True, True, True), size=9, layout=NHWC
):
    generator = torch.Generator().manual_seed(0)
    shape = (channels, outputs // groups) if transposed else (outputs, channels // groups)

    def some(*shape):
        return torch.randn(shape, generator=generator).bfloat16().contiguous(memory_format=layout)

    inputs, weight = some(images, channels, 9, 9), some(*shape, 3, 3)
    function = F.conv_transpose2d if transposed else F.conv2d
    out = function(inputs, weight, padding=1, groups=groups)
    geometry = ([outputs], [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    return Arguments(some(*out.shape), inputs, weight, *geometry, mask)


def by_kernel(keys, *given):
    """torch's kernel."""
    return torch.ops.aten.convolution_backward(*given)


def gradients(given, plan):
    return faster_backward(by_kernel, lambda by_plan, given, guess: plan)(None, *given)


CASES = {
    "plain": {},
    "NCHW": {"layout": torch.contiguous_format},
    "few channels": {"channels": 3},
    "depthwise": {"groups": 8},
    "groups": {"groups": 2},
    "transposed": {"transposed": True},
    "transposed to an image": {"transposed": True, "outputs": 3},
    "frozen inputs": {"channels": 3, "mask": (False, True, True)},
    "frozen weight": {"groups": 8, "mask": (True, False, False)},
    "without bias": {"groups": 8, "mask": (True, True, False)},
}


@pytest.mark.parametrize("case", CASES)
def test_every_plan_gives_torch_s_gradients(case):
    given = arguments(**CASES[case])
    theirs = by_kernel(None, *given)
    assert Plan() in plans(given)
    for plan in {*plans(given), first_guess(given)}:
        for ours, torchs, asked in zip(gradients(given, plan), theirs, given.output_mask, strict=True):
            assert (ours is None) == (not asked)
            if asked:
                assert ours.dtype is torch.bfloat16
                assert (ours - torchs).float().norm() < 0.01 * torchs.float().norm(), plan


def test_products_are_for_nhwc_and_fp32_for_groups_and_few_channels():
    def weights(**case):
        return {plan.weight for plan in plans(arguments(**case))}

    blocks = {"blocks"} if weight_gradient.KERNEL.unavailable is None else set()
    assert weights() == {"torch", "product"} | blocks
    assert weights(layout=torch.contiguous_format) == {"torch"}
    assert weights(channels=4) == {"torch", "product", "fp32"}
    assert weights(groups=8) == {"torch", "fp32"}
    assert weights(transposed=True, outputs=3) == {"torch"}
    assert weights(mask=(True, False, False)) == {"torch"}


def slowed(kernel, is_slow):
    def slow(keys, *given):
        if is_slow(Arguments(*given)):
            time.sleep(0.003)
        return kernel(keys, *given)

    return slow


def test_slow_kernel_of_torch_is_left_for_the_plan_without_it():
    tuner = Tuner(Choices(None), ALWAYS)
    of_weight = slowed(by_kernel, lambda given: given.output_mask[1] and given.inputs.dtype is torch.bfloat16)
    backward = faster_backward(of_weight, chooser(tuner))
    for _ in range(3):
        backward(None, *arguments(groups=8))
    (choice,) = tuner.found
    assert choice.way.endswith("/fp32")
    assert choice.gain > 2
    of_fp32 = slowed(by_kernel, lambda given: given.inputs.dtype is torch.float32)
    tuner = Tuner(Choices(None), ALWAYS)
    faster_backward(of_fp32, chooser(tuner))(None, *arguments(groups=8))
    assert tuner.found[0].way == "torch/torch"


def test_wrong_product_is_rejected(monkeypatch):
    monkeypatch.setattr(convolution, "_weight_gradient", lambda gradient, inputs, weight, *_: weight * 0)
    monkeypatch.setattr(weight_gradient, "weight_gradient", lambda *_, **__: torch.zeros(8, 8, 3, 3).bfloat16())
    slow = slowed(by_kernel, lambda given: given.output_mask[1])
    for channels in (8, 3):  # without and with fp32
        tuner = Tuner(Choices(None), ALWAYS)
        faster_backward(slow, chooser(tuner))(None, *arguments(channels=channels))
        assert tuner.found[0].way.rpartition("/")[2] not in ("product", "blocks")


def test_without_time_the_guess_is_taken_until_the_next_turn():
    budget = TimeFor(0.0)
    tuner = Tuner(Choices(None), budget)
    choose, plans_taken = chooser(tuner), []
    backward = faster_backward(by_kernel, lambda *given: plans_taken.append(choose(*given)) or plans_taken[-1])
    given = arguments(groups=8)
    for _ in range(3):
        backward(None, *given)
    assert plans_taken == [first_guess(given)] * 3
    assert len(budget.asked) == 1
    budget.seconds, budget.turn = 1000, 1
    backward(None, *given)
    assert tuner.measured == 1


def test_batches_of_about_the_same_size_share_a_choice():
    tuner = Tuner(Choices(None), ALWAYS)
    backward = faster_backward(by_kernel, chooser(tuner))
    for images in (5, 8, 9):
        backward(None, *arguments(groups=8, images=images))
    assert tuner.measured == 2
    backward(None, *arguments(groups=8, images=9, layout=torch.contiguous_format))
    assert tuner.measured == 3


def test_one_possible_plan_is_not_measured():
    budget = TimeFor(1000)
    tuner = Tuner(Choices(None), budget)
    faster_backward(by_kernel, chooser(tuner))(None, *arguments(layout=torch.contiguous_format))
    assert not budget.asked


def test_choice_of_another_version_that_is_no_plan_here_counts_as_the_guess():
    tuner = Tuner(Choices(None), ALWAYS)
    given = arguments(groups=8)
    faster_backward(by_kernel, chooser(tuner))(None, *given)
    ((key, choice),) = tuner.choices.all().items()
    tuner.choices.put(key, choice._replace(way="magic/torch"))
    plan = chooser(tuner)(lambda plan: None, given, first_guess(given))
    assert plan == first_guess(given)
