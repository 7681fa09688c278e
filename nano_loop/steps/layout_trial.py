"""Times one step of a model in NCHW and in NHWC, on copies."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from nano_loop.config.options import Options
from nano_loop.cpu.process import Waits, unsure
from nano_loop.patching.members import parameters_of
from nano_loop.patching.torch_private import calls_only_forward
from nano_loop.precision.verification.recorded_calls import RecordedCalls, loss_of
from nano_loop.precision.verification.traces import backward_into, random_states_kept, tensors_kept
from nano_loop.runtime.objects.called_functions import variables_kept
from nano_loop.runtime.objects.report import duration

#: The seconds of steps per layout, and the minimum and maximum number of steps.
_ENOUGH, _FEWEST, _MOST = 0.2, 3, 9
_DETERMINISTIC = "torch.use_deterministic_algorithms is on"


class LayoutTrial:
    """The layout of a model: a guess, until both layouts have been timed with the loop's first batch.

    The model does not change, and neither do random states, buffers, gradients and variables of the loop. `accelerated`
    returns a context in which a copy is accelerated.
    """

    def __init__(
        self, model: nn.Module, options: Options, accelerated: Callable[..., AbstractContextManager[Any]]
    ) -> None:
        self.model = weakref.ref(model)
        self.guess = options.reduced_precision
        self._options = options
        self._reason = _reason_not_to_time(model, options)
        self._accelerated = accelerated
        self._result = ""
        self.recorded = None if self._reason else RecordedCalls(model, options.kind.parameters is not None)

    def __str__(self) -> str:
        reason = self._reason or (self.recorded.reason if self.recorded else "")
        return self._result or f"{_name(self.guess)}, not timed: {reason or 'no step has followed a backward'}"

    def run(self, tensors: Iterable[Tensor]) -> bool | None:
        """Return whether NHWC is faster, or None; copies may access the loop's `tensors`, parameters and buffers."""
        if self.recorded is None or not self.recorded.is_ready:
            return None
        model = self.model()
        reason = "" if model is None else _reason_not_to_time(model, self._options)  # hooks may have been added since
        if reason:
            self._reason = reason
            self.recorded.end()
            return None
        waits = Waits()
        with tensors_kept(tensors):
            times = self.recorded.guarded(self._times)
        if times is None:
            return None
        in_nhwc = times[True] < times[False]
        both = f"{duration(times[True])} per step in NHWC, {duration(times[False])} in NCHW"
        self._result = f"{_name(in_nhwc)}: {both}{unsure(waits.share())}"
        return in_nhwc

    def _times(self) -> dict[bool, float]:
        """Return the minimum seconds of forward and backward, keyed by whether the layout is NHWC."""
        assert self.recorded is not None
        model, calls = self.recorded.take()
        copies: dict[bool, nn.Module] = {False: model, True: copy.deepcopy(model)}
        times: dict[bool, list[float]] = {False: [], True: []}
        with random_states_kept(), variables_kept(model), ExitStack() as stack:
            for layout, duplicate in copies.items():
                stack.enter_context(self._accelerated(duplicate, channels_last=layout))
                # Warm up: compile kernels and allocate memory.
                backward_into(duplicate, loss_of(duplicate, calls))
            while len(times[True]) < _FEWEST or (len(times[True]) < _MOST and sum(times[True]) < _ENOUGH):
                for layout, duplicate in copies.items():
                    began = time.perf_counter()
                    backward_into(duplicate, loss_of(duplicate, calls))
                    times[layout].append(time.perf_counter() - began)
        return {layout: min(seconds) for layout, seconds in times.items()}


def _name(in_nhwc: bool) -> str:
    return "NHWC" if in_nhwc else "NCHW"


def _reason_not_to_time(model: nn.Module, options: Options) -> str:
    """Return why a copy of a model must not be called, or an empty string."""
    if options.tune_operators is False:
        return "tune_operators is off"
    if options.compile:
        return "compiled models are not measured"
    if torch.are_deterministic_algorithms_enabled():
        return _DETERMINISTIC
    if not all(map(calls_only_forward, model.modules())):
        return "the model has hooks, which a copy would call"
    return "" if any(parameter.requires_grad for parameter in parameters_of(model)) else "no parameter is trained"
