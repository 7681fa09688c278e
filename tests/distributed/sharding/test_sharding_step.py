"""Ranks divide loaders for the duration of a run, with fast_fetch too."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed.data_parallel.averaged import make_step
from distributed.sharding.test_implicit_loaders import numbers, seen
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.fast_fetch import FastFetch
from nano_loop.steps.sharding import Sharding


def test_ranks_share_whole_batches(team):
    def loop(ranks):
        torch.manual_seed(ranks.rank)
        before = dict(vars(DataLoader))
        loader = DataLoader(numbers(10), 2, shuffle=True)
        steps = [make_step(kind, ranks)[0] for kind in (FastFetch, Sharding)]
        for each in steps:
            each.apply(TrainingObjects(loaders=[loader]))
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(TensorDataset, "__getitem__")
            epochs = [seen(loader), seen(loader)]
        for each in reversed(steps):
            each.undo()
        assert dict(vars(DataLoader)) == before
        return epochs, len(seen(loader))

    torch.manual_seed(0)
    plain = DataLoader(numbers(10), 2, shuffle=True)
    expected = [(each + each)[:6] for each in (seen(plain), seen(plain))]
    for rank, (epochs, after) in enumerate(team(2)(loop)):
        assert epochs == [each[rank::2] for each in expected]
        assert after == 5


def test_models_and_shard_of_other_calls_count_too_and_none_changes_nothing(team):
    def loop(ranks):
        model, late = nn.Linear(1, 1).eval(), nn.Linear(1, 1)
        loader, (sharding, _) = DataLoader(numbers(10), 2), make_step(Sharding, ranks)
        counts = []
        for shard in (None, True, None, False, None):
            sharding.apply(TrainingObjects(models=[model], loaders=[loader], shard=shard))
            counts.append((len(seen(loader)), len(loader)))
        other = DataLoader(numbers(10), 2)
        sharding.apply(TrainingObjects(loaders=[other]))
        counts.append((len(seen(other)), len(other)))
        sharding.observe(TrainingObjects(models=[late]))
        counts.append((len(seen(other)), len(other)))
        late.eval()
        counts.append((len(seen(other)), len(other)))
        sharding.undo()
        return counts

    whole, shared = (5, 5), (3, 3)
    assert team(2)(loop) == [[whole, shared, shared, whole, whole, whole, shared, whole]] * 2


def test_a_run_within_a_run_shares_once(team):
    def loop(ranks):
        loader, ((outer, _), (inner, _)) = DataLoader(numbers(10), 2), (make_step(Sharding, ranks) for _ in range(2))
        outer.apply(TrainingObjects(loaders=[loader]))
        inner.apply(TrainingObjects(loaders=[loader]))
        both = seen(loader)
        inner.undo()
        return both, seen(loader), outer.undo(), len(seen(loader))

    shares = [[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]
    assert team(2)(loop) == [(share, share, None, 5) for share in shares]
