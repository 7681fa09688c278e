"""Averages gradients over the ranks at the end of each backward, between hosts during it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

from torch import distributed, nn
from typing_extensions import override

from nano_loop.distributed.data_parallel.initial_sync import named_parameters
from nano_loop.errors import NanoError
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import RanksStep

if TYPE_CHECKING:
    from nano_loop.distributed.data_parallel.averaging import Averaging, Transport

_FILE = "averaging-gradients"
_AT_END, _DURING = "at the end of each backward", "during each backward"


class GradientAveraging(RanksStep):
    """Averages the gradients over all ranks in each backward; see `nano_loop.distributed.data_parallel`."""

    name = "gradient_averaging"
    needs = "trained"  # an optimizer may be set up without a model, with separate parameters

    @override
    def begin(self) -> None:
        self._averaging: Averaging | None = None
        self._chunk = 0  # of the transport through shared memory
        self._nbytes = 0  # of all parameters that were set up
        self._route = ""

    @override
    def apply(self, parts: TrainingObjects) -> str:
        # Here, since a run of one process needs none of it.
        from nano_loop.distributed.shared_memory.shared_ring import chunk_for

        self._nbytes += sum(
            parameter.numel() * parameter.itemsize for _, parameter in named_parameters(parts.models, parts.optimizers)
        )
        if self._averaging is None:
            self._averaging = self._open()
        elif 0 < self._chunk < chunk_for(self._nbytes):
            self._averaging.use(self._opened(self._make_transport()))
        self._averaging.add(parts.models, parts.optimizers)
        for model in parts.models:
            self.interceptors.add(model, self.name, self._averaging.around_call)
        return self._route

    @override
    def without_averaging(self, models: Iterable[nn.Module]) -> AbstractContextManager[None]:
        return nullcontext() if self._averaging is None else self._averaging.paused(models)

    @override
    def final_result(self) -> StepResult | None:
        if self._averaging is None:
            return None
        self._averaging.compare_rest()
        lines = ", ".join(self._averaging.drawn_alike)
        if not lines:
            return None
        detail = f"{self._route}; not known to be by the batch, so drawn alike on all ranks: random numbers of {lines}"
        return StepResult(self.name, "applied", detail, code="drawn_alike")

    def _open(self) -> Averaging:
        from nano_loop.distributed.data_parallel.averaging import Averaging
        from nano_loop.distributed.data_parallel.sync_batch_norm import norms_over_all_ranks

        self.undoing.enter_context(norms_over_all_ranks(self.ranks))
        transport = self._opened(self._make_transport())
        averaging = Averaging(
            self.ranks,
            transport,
            compare=self.options.compare_parameters,
            overlapped=not self.ranks.on_one_host,
        )
        self.undoing.callback(averaging.close)
        return averaging

    def _opened(self, transport: Transport) -> Transport:
        self.undoing.callback(transport.close)
        self.undoing.callback(transport.leave)
        return transport

    def _make_transport(self) -> Transport:
        """Return the shared-memory transport, which is faster, if available and no other backend was requested."""
        from nano_loop.distributed.data_parallel.buckets import GroupTransport
        from nano_loop.distributed.shared_memory.shared_file import map_together
        from nano_loop.distributed.shared_memory.shared_ring import SharedMemoryTransport, chunk_for

        backend = self.options.process_group_backend
        folder = self.ranks.folder
        if folder is not None and self.ranks.on_one_host and backend in (None, "gloo"):
            with suppress(NanoError):  # raised on every rank if shared memory is too small, as in many containers
                mapped, self._chunk = partial(map_together, self.ranks, folder / _FILE), chunk_for(self._nbytes)
                transport = SharedMemoryTransport(self.ranks, mapped, chunk=self._chunk)
                self._route = f"{_AT_END}, through shared memory"
                return transport
        self._chunk = 0
        self._route = f"{_AT_END if self.ranks.on_one_host else _DURING}, by {distributed.get_backend()}"
        return GroupTransport(self.ranks, self.ranks.context.gradient_group)
