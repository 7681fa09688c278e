"""Schedulers of each kind, built before and after the loop is accelerated."""

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


def shrinking(step):
    return 1 / (1 + step)


#: Of all settings that schedulers set: rates and momenta, by a function, by the loss and by other schedulers.
SCHEDULERS = {
    "OneCycleLR": functools.partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=STEPS + 1),
    "LambdaLR": functools.partial(schedulers.LambdaLR, lr_lambda=shrinking),
    "SequentialLR": warmup_then_cosine,
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
