"""Each family of schedulers, built before and after the loop is accelerated."""

import functools

import pytest
from torch.optim import lr_scheduler as schedulers

from .pairs import EXACT, FUSED, WITH_IPEX, pair, untouched
from .tasks import ADAMW, entropy, job, train

STEPS = 15


def warmup_then_cosine(optimizer):
    warmup = schedulers.LinearLR(optimizer, 0.1, total_iters=4)
    cosine = schedulers.CosineAnnealingLR(optimizer, STEPS - 4)
    return schedulers.SequentialLR(optimizer, [warmup, cosine], milestones=[4])


def chained(optimizer):
    parts = [schedulers.ConstantLR(optimizer, 0.5, total_iters=5), schedulers.ExponentialLR(optimizer, 0.9)]
    return schedulers.ChainedScheduler(parts)


def shrinking(step):
    return 1 / (1 + step)


SCHEDULERS = {
    "StepLR": functools.partial(schedulers.StepLR, step_size=2, gamma=0.5),
    "MultiStepLR": functools.partial(schedulers.MultiStepLR, milestones=[3, 7]),
    "ExponentialLR": functools.partial(schedulers.ExponentialLR, gamma=0.9),
    "CosineAnnealingLR": functools.partial(schedulers.CosineAnnealingLR, T_max=STEPS),
    "CosineAnnealingWarmRestarts": functools.partial(schedulers.CosineAnnealingWarmRestarts, T_0=4),
    "OneCycleLR": functools.partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=STEPS + 1),
    "CyclicLR": functools.partial(schedulers.CyclicLR, base_lr=0.001, max_lr=0.05, step_size_up=3),
    "LambdaLR": functools.partial(schedulers.LambdaLR, lr_lambda=shrinking),
    "MultiplicativeLR": functools.partial(schedulers.MultiplicativeLR, lr_lambda=shrinking),
    "LinearLR": schedulers.LinearLR,
    "PolynomialLR": functools.partial(schedulers.PolynomialLR, total_iters=9, power=2.0),
    "SequentialLR": warmup_then_cosine,
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": functools.partial(schedulers.ReduceLROnPlateau, patience=1, threshold=0.2),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # raised by SequentialLR of torch 2.8 itself
@pair(
    *(job(f"{name}, before", scheduler=make) for name, make in SCHEDULERS.items()),
    *(job(f"{name}, in the loop", optimizer=ADAMW, scheduler=name) for name in SCHEDULERS),
    configs=[EXACT, FUSED, *WITH_IPEX],
    repeats=[EXACT],
)
def test_scheduler(model, optimizer, loader, scheduler, by_hand=untouched):
    """Every scheduler steps once per batch; return the rates it set and those in the optimizer."""
    if isinstance(scheduler, str):
        scheduler = SCHEDULERS[scheduler](optimizer)
    rates = []
    for _ in range(3):
        for batch in loader:
            loss = train(entropy(by_hand(model)), [batch], optimizer)
            scheduler.step(*loss * isinstance(scheduler, schedulers.ReduceLROnPlateau))
            rates.append((scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]))
    assert len({rate for _, rate in rates}) > 1
    assert len(rates) == STEPS
    assert scheduler.optimizer is optimizer
    return rates, scheduler.state_dict()
