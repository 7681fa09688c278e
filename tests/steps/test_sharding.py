"""The step reports what happens to each loader; `tests/distributed/sharding` covers the ranks."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from nano_loop import NanoWarning
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.sharding import Sharding

TWO = Ranks(0, 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def numbers(count=10, **options):
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=2, **options)


def test_it_says_what_becomes_of_each_loader(step):
    by_user = numbers(sampler=DistributedSampler(range(10), 2, 0))
    sharding = step(Sharding, ranks=TWO)
    assert sharding.skip_reason(TrainingObjects(loaders=[numbers(), by_user])) is None
    assert sharding.apply(TrainingObjects(loaders=[numbers()])) == "1 of 1 loaders by batch, in rank 0's order"
    assert sharding.apply(TrainingObjects(loaders=[numbers(), by_user, DataLoader(Stream()), numbers()])) == (
        "2 of 4 loaders by batch, in rank 0's order; "
        "1 of 4 loaders read by every rank, which keeps its own; "
        "1 of 4 loaders sharded by their own samplers"
    )
    assert sharding.apply(TrainingObjects(loaders=[numbers()], shard=False)) == "1 of 1 loaders whole (shard=False)"


def test_it_is_skipped_where_the_user_has_done_it(step):
    by_user = numbers(sampler=DistributedSampler(range(10), 2, 0))
    sharding = step(Sharding, ranks=TWO)
    assert sharding.skip_reason(TrainingObjects(loaders=[by_user])).code == "sharded_by_user"
    # Their workers are still bound.
    assert step(Sharding, ranks=Ranks(0, 2, loader_cpus=(0,))).skip_reason(TrainingObjects(loaders=[by_user])) is None


SCHEDULERS = {
    "one cycle": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps),
    "cosine": lr_scheduler.CosineAnnealingLR,
    "polynomial": lr_scheduler.PolynomialLR,
    "a class of the user's": type("Own", (lr_scheduler.CosineAnnealingLR,), {}),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize(
    ("steps", "every", "undivided", "is_told"),
    [(20, 1, False, True), (10, 1, False, False), (60, 1, False, False), (20, 1, True, False), (2, 10, False, False)],
    ids=["for all ranks", "for one", "ended early", "undivided", "an epoch"],
)
def test_scheduler_for_the_batches_of_all_ranks_is_warned_of_at_the_end(step, make, steps, every, undivided, is_told):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler, before = make(optimizer, steps), lr_scheduler.LRScheduler.step
    sharding = step(Sharding, ranks=TWO)
    sharding.clock.add([optimizer])
    sharding.observe(TrainingObjects([model], [optimizer]))
    for number in range(1, 11):
        optimizer.step()
        if number % every == 0:
            scheduler.step()
    sharding.ranks.context.sharding.undivided = undivided
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharding.final_result()
    sharding.undo()
    said = [str(warning.message) for warning in caught if warning.category is NanoWarning]
    assert [f"is at step 10 of {steps}" in each for each in said] == [True] * is_told
    assert lr_scheduler.LRScheduler.step is before
