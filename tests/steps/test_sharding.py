"""The step says what becomes of each loader; `tests/distributed/test_sharding_step.py` holds what ranks do with it."""

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from nano_loop.distributed.comm.ranks import ALONE, Ranks
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.sharding import Sharding

TWO = Ranks(0, 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def numbers(count=10, **options):
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=2, **options)


def test_it_is_for_several_ranks(step):
    assert not step(Sharding, ranks=ALONE).enabled
    assert step(Sharding, ranks=TWO).enabled
    assert not step(Sharding, ranks=TWO).required


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
    # Their workers are bound all the same.
    assert step(Sharding, ranks=Ranks(0, 2, loader_cpus=(0,))).skip_reason(TrainingObjects(loaders=[by_user])) is None
