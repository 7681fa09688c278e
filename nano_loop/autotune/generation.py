"""The algorithms for the calls of a run: those measured to be the fastest, or the defaults."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch

from nano_loop.autotune.race import key_of, kind_of, race_of
from nano_loop.autotune.tuner import Tuner
from nano_loop.kernels.override import Call, Compute
from nano_loop.patching.deterministic_mode import may_depend_on_times
from nano_loop.patching.torch_private import in_mode
from nano_loop.patching.torch_private_autograd import in_backward

#: Maximum number of kinds of calls to remember: a loop may have a new shape in each batch.
_MOST_KINDS = 1024


class Generation:
    """The algorithms of calls from one turn of the tuner to the next. All calls of a kind use that of the first call.

    The interceptors of a run have the latest generation in their rules, so a backward uses that of its forward: a
    recomputation matches the original even if another optimizer has stepped in between, as in a GAN.

    Parameters
    ----------
    tuner : Tuner
        The tuner of the run.
    settled : mapping
        The algorithms of kinds that an earlier generation has measured.
    """

    def __init__(self, tuner: Tuner, settled: Mapping[Hashable, str] | None = None) -> None:
        self._tuner = tuner
        self._settled: dict[Hashable, str] = dict(settled or {})
        self._guessed: dict[Hashable, str] = {}

    def next(self) -> Generation:
        """Return the next generation, which tries again to measure kinds that use the default."""
        return Generation(self._tuner, self._settled)

    def algorithm(self, call: Call, algorithms: Callable[[], Mapping[str, Compute]], guess: str) -> str:
        """Return the name of the algorithm for a call; see `nano_loop.kernels.override.choose`."""
        if not may_depend_on_times():
            return guess
        kind = kind_of(call)
        known = self._settled.get(kind) or self._guessed.get(kind)
        return self._first(kind, call, algorithms(), guess) if known is None else known

    def _first(self, kind: Hashable, call: Call, algorithms: Mapping[str, Compute], guess: str) -> str:
        race = race_of(call, algorithms)
        chosen: str | None = guess
        if race is not None:
            key = key_of(call)
            stored = self._tuner.choices.get(key)
            if stored is not None:
                chosen = stored.algorithm
            # An activation checkpoint may repeat a call with gradients, so do not measure it within a backward.
            elif in_mode() or torch.is_inference_mode_enabled() or (call.leaves and in_backward()):
                chosen = None
            else:
                chosen = self._tuner.choose(key, guess, lambda: race)
            if chosen is not None and chosen not in race.algorithms:  # a choice of another version
                chosen = guess
        if len(self._settled) + len(self._guessed) >= _MOST_KINDS:
            self._settled.clear()
            self._guessed.clear()
        (self._guessed if chosen is None else self._settled)[kind] = guess if chosen is None else chosen
        return guess if chosen is None else chosen
