"""Shards the loaders' batches among the ranks. In an evaluation, every rank gets all batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, PolynomialLR
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from nano_loop.distributed.launch.active_runs import innermost
from nano_loop.distributed.sharding.sharding import (
    BatchSharding,
    serving,
    sharding_samplers,
    whole_evaluations_not_joined,
)
from nano_loop.distributed.sharding.splitting import BatchSplitting, splits_indices
from nano_loop.errors import error_message
from nano_loop.patching.attributes import replaced
from nano_loop.patching.lifetime import WeakIdKeyDictionary, undone_with
from nano_loop.patching.loaders import changed, implicit_loaders_changed
from nano_loop.patching.user_code import warn
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import RanksStep, SkipReason


class Sharding(RanksStep):
    """Assigns batches r, r+N, … to rank r, of the loaders of ``setup`` and, once a model is set up, of all others."""

    name = "loaders"
    needs = "loaders"

    @override
    def begin(self) -> None:
        self._models: Any = WeakIdKeyDictionary()
        self._shardings: Any = WeakIdKeyDictionary()  # `BatchSharding` by loader
        self._number = 0  # number of loaders that were set up
        self._finding = False
        self._known: Any = WeakIdKeyDictionary()  # see `OwnShares`
        self._steps: Any = WeakIdKeyDictionary()  # number of steps in the run, by scheduler

    @override
    def observe(self, parts: TrainingObjects) -> None:
        """Record the models of a ``setup`` call, with or without loaders. Their mode shows whether the loop trains."""
        if self.ranks.size == 1:
            return
        for model in parts.models:
            self._models[model] = True
        if parts.trained and not self._finding:
            self._finding = True
            self.undoing.enter_context(implicit_loaders_changed(self._find))
            self.undoing.enter_context(whole_evaluations_not_joined(self.ranks))
            if self.ranks.rank == 0:
                self.undoing.enter_context(replaced(LRScheduler, "step", functools.partial(_counting, self._steps)))

    @property
    @override
    def enabled(self) -> bool:
        return super().enabled or self.options.split_batches

    @override
    def is_relevant(self, parts: TrainingObjects) -> bool:
        return super().is_relevant(parts) or self.ranks.size == 1

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if self.ranks.size == 1:
            return SkipReason("one_process", "split_batches has no effect with one process")
        if self.ranks.loader_cpus or not all(sharding_samplers(loader, self.ranks.size) for loader in parts.loaders):
            return None
        return SkipReason("sharded_by_user", "their own samplers shard them")

    @override
    def apply(self, parts: TrainingObjects) -> str:
        self.observe(parts)
        for loader in parts.loaders:
            self._shard(loader, parts.shard)
        kinds = [self._kind(loader) for loader in parts.loaders]
        counts = {kind: kinds.count(kind) for kind in _KINDS if kind in kinds}
        return "; ".join(f"{count} of {len(kinds)} loaders {kind}" for kind, count in counts.items())

    @override
    def final_result(self) -> StepResult | None:
        sharding = self.ranks.context.sharding
        if not sharding.undivided and self.ranks.context.split is None:
            self._warn_of_schedules()
        if sharding.own_shares:
            verdicts = [f"{name} {_DRAWN if drawn else _DIVIDED}" for name, drawn in sharding.own_shares.items()]
            code = "drawn_differently" if any(sharding.own_shares.values()) else "divided_by_program"
            return StepResult(self.name, "skipped", f"{', '.join(verdicts)}: {_ALL}", code=code)
        if not sharding.implicit_loaders:
            return None
        how = _BY_BATCH if self.ranks.context.split is None else "each batch split"
        return StepResult(self.name, "applied", f"loaders that were not set up, {how}")

    def _warn_of_schedules(self) -> None:
        """Warn about schedulers that count this rank's batches but were built for the batches of all ranks."""
        size = self.ranks.size
        for scheduler, steps in [*self._steps.items()]:
            total = next((getattr(scheduler, name) for kind, name in _ENDS.items() if isinstance(scheduler, kind)), 0)
            counts_batches = steps * max(len(self.clock.optimizers), 1) >= self.clock.steps
            if counts_batches and abs(scheduler.last_epoch * size - total) <= _ABOUT * total:
                got = f"{type(scheduler).__name__} is at step {scheduler.last_epoch} of {total} at the end of the run"
                expected = f"each of {size} processes gets one of {size} batches, and so takes fewer steps"
                advice = f"Build it for ceil(len(loader) / {size}) steps per epoch, or inside the training function"
                warn(error_message(got, expected, advice))

    def _find(self, loader: DataLoader[Any]) -> BatchSharding | None:
        """Return the change to a loader that the loop uses but that was not set up."""
        run = innermost()
        # A loader inside a dataset, or in a run that each rank starts alone.
        if serving.depth or (run is not None and run.size == 1):
            return None
        return self._sharding()

    def _sharding(self, number: int = 0) -> BatchSharding:
        split = self.ranks.context.split
        make = BatchSharding if split is None else functools.partial(BatchSplitting, split)
        return make(self.ranks, self._models, known=self._known, number=number)

    def _shard(self, loader: DataLoader[Any], shard: bool | None) -> None:
        if loader not in self._shardings:
            self._number += 1
            self._shardings[loader] = self._sharding(number=self._number)
            undone_with(loader, self.undoing).enter_context(changed(loader, self._shardings[loader]))
        if shard is not None:
            self._shardings[loader].choose(shard)

    def _kind(self, loader: DataLoader[Any]) -> str:
        if sharding_samplers(loader, self.ranks.size):
            return _BY_USER
        if self._shardings[loader].shard is False:
            return _WHOLE
        if self.ranks.context.split is not None:
            return _SPLIT_INDICES if splits_indices(loader) else _SPLIT
        return _READ_BY_ALL if isinstance(loader.dataset, IterableDataset) else _BY_BATCH


def _counting(steps: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        steps[self] = steps.get(self, 0) + 1

    return step


#: Schedulers that end with the training, and the attribute that holds their total number of steps.
_ENDS = {OneCycleLR: "total_steps", CosineAnnealingLR: "T_max", PolynomialLR: "total_iters"}
_ABOUT = 0.1  # of all steps: batches that do not divide evenly, and gradients that are accumulated at the end of epochs
_BY_BATCH = "by batch, in rank 0's order"
_READ_BY_ALL = "read by every rank, which keeps its own"
_WHOLE = "whole (shard=False)"
_BY_USER = "sharded by their own samplers"
_DIVIDED = "divided by the program"
_DRAWN = "drawn differently on each rank"
_ALL = "each rank reads all of its data"
_SPLIT_INDICES = "split by the indices of each batch"
_SPLIT = "read by every rank, which keeps its part of each batch"
_KINDS = (_SPLIT_INDICES, _SPLIT, _BY_BATCH, _READ_BY_ALL, _WHOLE, _BY_USER)
