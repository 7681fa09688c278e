"""Averages gradients over the ranks in each backward, without a wrapper around the model.

A hook on each parameter records its gradient's arrival. The first one in a backward queues a callback at its end, so
the gradients are averaged when `backward()` returns, and the loop's next operations, such as clipping, see the mean.
Before the averaging, the ranks exchange what arrived and where they are: a parameter that any rank used counts on all
of them, and ranks that have diverged raise an error.

Processes that a rank forks inherit its hooks, but do not take part.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import record_function

from nano_loop.config.protocol import AVERAGING_EVENT
from nano_loop.data.random_states import diverge_rng
from nano_loop.distributed.comm.mismatch import AVERAGING
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel.agreement import Agreement, Fingerprint
from nano_loop.distributed.data_parallel.buckets import NONE
from nano_loop.distributed.data_parallel.checksums import checksums
from nano_loop.distributed.data_parallel.combining_operators import calls_noted
from nano_loop.distributed.data_parallel.comparison import Comparison
from nano_loop.distributed.data_parallel.drawing_operators import drawing
from nano_loop.distributed.data_parallel.mean_losses import means_over_all_ranks
from nano_loop.distributed.data_parallel.means import Means, Transport
from nano_loop.distributed.data_parallel.parameters import Parameters
from nano_loop.distributed.data_parallel.random_draws import RandomDraws
from nano_loop.distributed.data_parallel.roots import WeightedRoots, mean_loss
from nano_loop.errors import error_message
from nano_loop.patching.calls.backward import at_end_of_backward, nested_backwards_noticed
from nano_loop.patching.calls.calls import Call
from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.members import parameters_of
from nano_loop.patching.optimizers import called_after_steps, called_before_steps, closure_of, held_by, with_closure
from nano_loop.patching.torch_private_autograd import graph_task, in_backward
from nano_loop.patching.torch_private_optimizers import is_profiling
from nano_loop.patching.user_code import warn


class Averaging:
    """The hooks that average the gradients of some models and optimizers over the ranks.

    ``p.grad`` is averaged as a whole: an earlier mean in it, which is equal on all ranks, does not change when
    gradients are accumulated. The transport is not closed.
    """

    def __init__(
        self,
        ranks: Ranks,
        transport: Transport,
        *,
        compare: bool = True,
        overlapped: bool = False,
        comparison: Comparison | None = None,
    ) -> None:
        self._ranks = ranks
        self._thread = threading.get_ident()  # the loop's; training in other threads does not belong to the run
        self._process = os.getpid()
        self._parameters = Parameters(self._note)
        self._agreement = Agreement(ranks, self._parameters, compare=compare)
        self._means = Means(ranks, transport, overlapped=overlapped)
        self._waiting: set[int] = set()  # ids of parameters whose gradients have arrived but are not averaged yet
        self._paused: list[nn.Module] = []
        self._task = -1  # graph task id of the pending end-of-backward callback
        self._noted = False  # whether any gradient arrived in it
        self._has_warned = False
        self._has_trained = False  # whether a model was called with gradients enabled, or gradients were averaged
        self._at_step: Any = WeakIdKeyDictionary()  # averagings before the last step, by optimizer
        split = ranks.context.split
        self._roots = None if split is None else WeightedRoots(split, comparison or Comparison(ranks, split))
        #: The user's lines whose random draws were treated as independent of the batch, if ranks share it.
        self.drawn_alike: Iterable[str] = ()
        with ExitStack() as undoing:
            undoing.callback(self._parameters.close)
            undoing.enter_context(called_before_steps(self._before_step))
            undoing.enter_context(called_after_steps(self._after_step))
            undoing.enter_context(nested_backwards_noticed())
            if self._roots is not None:
                draws = RandomDraws(ranks, self._roots.comparison.drawn)
                self.drawn_alike = draws.drawn_alike
                undoing.enter_context(self._roots.weighted())
                undoing.enter_context(means_over_all_ranks(ranks))
                undoing.enter_context(drawing(draws.draw, ranks))
                if ranks.context.witness is not None:  # on rank 0
                    undoing.enter_context(calls_noted(ranks.context, self._roots.sample_weights.note_call))
            self._undoing = undoing.pop_all()

    def add(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        """Also average the gradients of these from now on; their tensors are already equal on all ranks. Collective."""
        self._parameters.forget_dropped(self._ranks.gather)
        known = set(map(id, self._parameters.in_order))
        self._waiting &= known
        self._means.averaged.keep(known)
        for optimizer in optimizers:
            if optimizer not in self._at_step:
                self._at_step[optimizer] = self._agreement.averagings
        self._parameters.add(models, optimizers)

    @contextmanager
    def paused(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Only record gradients of parameters of `models`; the first averaging afterwards includes them."""
        before = self._paused
        self._paused = [*before, *models]
        try:
            yield
        finally:
            self._paused = before

    def around_call(self, call: Call) -> Call:
        """Wrap calls into a model, which synchronize parameters that the loop has added on all ranks."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or in_backward() or self._forked:
                return call(*args, **kwargs)
            self._parameters.refresh(looks_at_hooks=True)
            # A rank may evaluate alone, so an evaluation must not be collective.
            if torch.is_grad_enabled():
                self._has_trained = True
                diverge_rng(self._ranks)
                self._agreement.sync_added_parameters()
                if self._roots is not None:
                    trains = any(model.training for model in self._parameters.models)
                    self._roots.comparison.note_call([*args, *kwargs.values()], trains=trains)
            result = call(*args, **kwargs)
            self._parameters.refresh()  # parameters that the model has added in the call need hooks before the backward
            return result

        return called

    def average(self) -> None:
        """Average gradients that are pending on any rank; raise on every rank if they have diverged. Collective."""
        with record_function(AVERAGING_EVENT) if is_profiling() else nullcontext():
            diverge_rng(self._ranks)  # for a model that is only called inside an autograd function, without gradients
            self._has_trained = True
            self._parameters.refresh()
            held = {id(parameter) for model in self._paused for parameter in parameters_of(model)}
            values = () if self._roots is None else (self._roots.values(), self._roots.sample_weights.take())
            arrived = self._parameters.arrived(self._waiting - held)
            in_order = self._parameters.in_order
            is_posted = self._means.post(in_order, arrived)
            state = self._means.overlap.state
            fingerprints = self._agreement.exchange("average", arrived, state, *values, is_posted=is_posted)
            self._set_losses(fingerprints)
            self._means.compute(in_order, fingerprints)
            if self._roots is not None and not held:
                self._roots.comparison.end_backward(self._parameters)
            self._waiting &= held
            self._agreement.sync_added_parameters()  # too late for a backward that was the first to use them
            self._agreement.end_averaging()

    def compare_rest(self) -> None:
        """At the end of the run, compare parameters whose gradients were never averaged; see `Agreement`."""
        if self._has_trained:
            self._agreement.compare_rest(self._means.averaged)

    def close(self) -> None:
        """Remove all hooks."""
        self._undoing.close()

    @property
    def _forked(self) -> bool:
        """Whether this is a process that the rank has forked."""
        return os.getpid() != self._process

    def _note(self, parameter: torch.Tensor) -> None:
        """Record the arrival of a gradient; the hook of every parameter."""
        if self._forked:
            return
        self._waiting.add(id(parameter))
        self._noted = True
        if self._task != (task := graph_task()):
            self._task = task
            self._means.overlap.start(allowed=not self._paused and not self._parameters.added_parameters)
            at_end_of_backward(self._end_backward)
        self._means.overlap.send(parameter)

    def _end_backward(self) -> None:
        # Several may have been queued in one backward if others ran inside it.
        if self._noted:
            self._noted = False
            if not self._all_paused():
                self.average()
            elif self._roots is not None:
                nothing = self._parameters.arrived(set())
                values = self._roots.values(), self._roots.sample_weights.take()
                self._set_losses(self._agreement.exchange("losses", nothing, NONE, *values))

    def _set_losses(self, fingerprints: Sequence[Fingerprint]) -> None:
        """Replace the losses of a backward by the means over all ranks, if they share a batch."""
        if self._roots is not None:
            if self._ranks.rank == 0:
                self._roots.compare_weights([fingerprint.weights for fingerprint in fingerprints])
            self._roots.become_means([fingerprint.losses for fingerprint in fingerprints])

    def _all_paused(self) -> bool:
        paused = {id(model) for model in self._paused}
        return bool(paused) and all(id(model) in paused for model in self._parameters.models)

    def _is_shared(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps parameters that were set up; warn if it also steps others."""
        self._parameters.refresh()
        held = {id(parameter) for parameter in held_by(optimizer) if parameter.requires_grad}
        averaged = set(map(id, self._parameters.in_order))
        is_foreign = not averaged.issuperset(held) and threading.get_ident() == self._thread
        if is_foreign and not self._has_warned and self._ranks.rank == 0:
            self._has_warned = True
            got = f"{type(optimizer).__name__} steps parameters that were not set up"
            warn(error_message(got, _OWN, _SET_UP))
        return not averaged.isdisjoint(held)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Make the closure return the mean over the ranks; without one, average gradients not averaged yet."""
        if self._forked or not (optimizer in self._at_step or self._is_shared(optimizer)):
            return None
        closure = closure_of(args, kwargs)
        if closure is not None:
            return with_closure(args, kwargs, lambda: mean_loss(closure(), self._ranks))
        if not self._all_paused():
            self._settle(optimizer)
        if self._roots is not None and not in_backward():
            self._roots.comparison.before_step(optimizer, are_means=not self._all_paused())
        return None

    def _settle(self, optimizer: Optimizer) -> None:
        """Average gradients of a step that are not means yet: the loop's own, paused, or of a hook that steps."""
        self._parameters.refresh()
        held = held_by(optimizer)
        ready = {id(parameter) for parameter in held if parameter.grad is not None}
        if in_backward() or self._at_step.get(optimizer) == self._agreement.averagings:
            if not in_backward():
                own = [parameter for parameter in held if id(parameter) in ready - self._waiting]
                if own and self._roots is not None:
                    self._roots.comparison.begin_step()
                self._note_own(own)
            self._waiting |= ready
            self.average()
            return
        self._wait_for_replaced(set(map(id, held)) - self._waiting)
        if self._waiting & ready:
            self.average()

    def _wait_for_replaced(self, held: set[int]) -> None:
        """Average gradients that the loop has put in place of means, unless they are equal on all ranks."""
        in_order = [parameter for parameter in self._parameters.in_order if id(parameter) in held]
        replaced = self._means.averaged.replaced(in_order)
        if not replaced:
            return
        own_checksums = repr(checksums(parameter.grad for parameter in replaced))  # as text, in which NaN equals NaN
        if len({*self._ranks.gather(own_checksums, AVERAGING)}) > 1:
            self._note_own(replaced)
        else:
            self._means.averaged.note(replaced)

    def _note_own(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average gradients that the loop itself has computed from this rank's share."""
        if self._roots is not None:
            self._roots.scale(parameters)
        self._waiting |= set(map(id, parameters))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._forked:
            return
        if optimizer in self._at_step:
            self._agreement.steps += 1
            self._at_step[optimizer] = self._agreement.averagings
        elif self._roots is None or not self._is_shared(optimizer):
            return
        if self._roots is not None:
            self._roots.comparison.after_step(optimizer, self._parameters.optimizers)


_OWN = "every rank trains its own copy, and only rank 0's is kept"
_SET_UP = "Call self.setup(model, optimizer) in train, or make them before and pass them as arguments"
