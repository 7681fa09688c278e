"""Averages gradients over the ranks at the end of each backward, or during it between hosts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from torch import distributed, nn
from typing_extensions import override

from nano_loop.patching.lifetime import undone_with
from nano_loop.patching.loaders import changed
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import RanksStep

if TYPE_CHECKING:
    from nano_loop.distributed.data_parallel.averaging import Averaging
    from nano_loop.distributed.data_parallel.comparison import Comparison
    from nano_loop.distributed.data_parallel.means import Transport
    from nano_loop.distributed.data_parallel.witness import Witness

_FILE = "averaging-gradients"
_OF_SUM = ", of a loss that is a sum over samples"
_AT_END, _DURING = "at the end of each backward", "during each backward"


class GradientAveraging(RanksStep):
    """Averages the gradients over all ranks in each backward; see `nano_loop.distributed.data_parallel`."""

    name = "gradient_averaging"
    needs = "trained"  # an optimizer may be set up without a model, with separate parameters

    @override
    def begin(self) -> None:
        self._averaging: Averaging | None = None
        self._comparison: Comparison | None = None
        self._witness: Witness | None = None
        self._route = ""

    @property
    @override
    def enabled(self) -> bool:
        return super().enabled or self.ranks.context.witness is not None

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if self.ranks.size == 1:  # in the witness, with whose gradients rank 0 compares
            assert self._witness is not None
            self._witness.add(parts.models, parts.optimizers)
            return "sent to rank 0"
        if self._averaging is None:
            self._averaging = self._open()
        self._averaging.add(parts.models, parts.optimizers)
        for model in parts.models:
            self.interceptors.add(model, self.name, self._averaging.around_call)
        return self._route

    def without_averaging(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the gradients of `model` are not averaged."""
        return nullcontext() if self._averaging is None else self._averaging.paused([model])

    @override
    def final_result(self) -> StepResult | None:
        remark, code = "", None
        if self._averaging is not None:
            self._averaging.compare_rest()
            if lines := ", ".join(self._averaging.drawn_alike):
                remark = f"; random numbers not known to be per sample, so drawn identically on all ranks: {lines}"
                code = "drawn_alike"
        if self._comparison is None:
            return None
        result = partial(StepResult, "split_batches")
        if not self._comparison.compared:
            detail = f"not compared with whole batches: {self._comparison.why_not}{remark}"
            return result("skipped", detail, code=code or "not_compared")
        of_sum = _OF_SUM * (self._comparison.split.reduction == "sum")
        off = self._comparison.rounding
        within = f" except for {off:.1g}, which rounding explains: losses are equal" if off else ""
        return result("applied", f"gradients equal those of whole batches{within}{of_sum}{remark}", code=code)

    @override
    def observe(self, parts: TrainingObjects) -> None:
        """Let the witness see the batches of loaders that are set up, with or without a model."""
        if self.ranks.context.witness is not None and self.ranks.size == 1:
            from nano_loop.distributed.data_parallel.witness import Witness

            if self._witness is None:
                self._witness = Witness(self.ranks.context.witness)
                self.undoing.callback(self._witness.close)
            for loader in parts.loaders:
                undone_with(loader, self.undoing).enter_context(changed(loader, self._witness))

    def _open(self) -> Averaging:
        # Imported here, since a run with one process does not need it.
        from nano_loop.distributed.data_parallel.averaging import Averaging
        from nano_loop.distributed.data_parallel.sync_batch_norm import norms_over_all_ranks

        self.undoing.enter_context(norms_over_all_ranks(self.ranks))
        if self.ranks.context.split is not None:
            from nano_loop.distributed.data_parallel.comparison import Comparison

            is_rounded = self.options.reduced_precision or self.options.kind.products_name is not None
            self._comparison = Comparison(self.ranks, self.ranks.context.split, is_rounded=is_rounded)
        transport = self._make_transport()
        self.undoing.callback(transport.close)
        averaging = Averaging(
            self.ranks,
            transport,
            compare=self.options.compare_parameters,
            overlapped=not self.ranks.on_one_host,
            comparison=self._comparison,
        )
        self.undoing.callback(averaging.close)
        return averaging

    def _make_transport(self) -> Transport:
        """Return the shared-memory transport, which is faster, on one host if no other backend was requested."""
        from nano_loop.distributed.data_parallel.buckets import GroupTransport
        from nano_loop.distributed.shared_memory.shared_file import map_together
        from nano_loop.distributed.shared_memory.shared_ring import SharedMemoryTransport

        backend = self.options.process_group_backend
        folder = self.ranks.folder
        if folder is not None and self.ranks.on_one_host and backend in (None, "gloo"):
            self._route = f"{_AT_END}, through shared memory"
            return SharedMemoryTransport(self.ranks, partial(map_together, self.ranks, folder / _FILE))
        self._route = f"{_AT_END if self.ranks.on_one_host else _DURING}, by {distributed.get_backend()}"
        return GroupTransport(self.ranks, self.ranks.context.gradient_group)
