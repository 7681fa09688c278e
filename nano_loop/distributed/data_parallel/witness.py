"""The witness: an additional process that computes whole batches, where ranks share each batch.

It is alone in its run, which starts in the same state, and runs the same function until each optimizer has stepped.
After each backward, and before a step without one, it sends the losses, and its gradients in a file that rank 0 deletes
before the next one. `nano_loop.distributed.data_parallel.comparison` compares them. Finally it sends the losses of the
next backward: a loop may keep values of a batch, such as the keys of a queue, for later ones.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from nano_loop.data.random_states import checksum_of_libraries, differing, process_states
from nano_loop.distributed.comm.ranks import ALONE
from nano_loop.distributed.comm.split_batches import batch_sums, random_state
from nano_loop.distributed.data_parallel.checksums import checksums, norm_of_gradients, rates_of
from nano_loop.distributed.data_parallel.drawing_operators import drawing
from nano_loop.distributed.data_parallel.parameters import Parameters
from nano_loop.distributed.data_parallel.random_draws import may_be_by_batch, order_of
from nano_loop.patching.calls.backward import backwards_watched, roots_weighted
from nano_loop.patching.loaders import ClassIteration, LoaderChange, Start, implicit_loaders_changed
from nano_loop.patching.optimizers import called_after_steps, called_before_steps, closure_of, held_by
from nano_loop.patching.torch_private_autograd import in_backward


class Witness(LoaderChange):
    """Records the witness's results, and sends them to rank 0 by `report`; see `launch.stream.Reporter.report`."""

    def __init__(self, report: Callable[..., object]) -> None:
        self._report = report
        self._place = os.getpid(), threading.get_ident()
        self._file = Path(tempfile.mkdtemp()) / "gradients"
        self._parameters = Parameters(lambda parameter: None)
        self._stepped: dict[int, Optimizer] = {}  # by id
        self._reports = 0
        self._at_step: dict[int, int] = {}  # reports before the last step, by the optimizer's id
        self._is_last = False  # whether the next backward is the last one that it reports
        self._losses: list[float] = []
        self._sums: tuple[float, ...] = ()
        self._states: list[Any] | None = None  # random states when the last batch arrived
        self._batches = 0
        self._evaluates = False  # whether the latest batch belongs to an evaluation
        self._loads = False  # whether a loader draws, such as the order of samples
        self._draws: list[Any] = []  # shapes and orders of random draws since the last batch
        self._undoing = ExitStack()
        self._undoing.callback(self._parameters.close)
        self._undoing.enter_context(roots_weighted(self._begin))
        self._undoing.enter_context(backwards_watched(self._end))
        self._undoing.enter_context(called_before_steps(self._before_step))
        self._undoing.enter_context(called_after_steps(self._after_step))
        self._undoing.enter_context(implicit_loaders_changed(lambda loader: self))
        self._undoing.enter_context(drawing(self._note_draw, ALONE))

    def add(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        """Also send the gradients of these from now on."""
        self._parameters.add(models, optimizers)

    def close(self) -> None:
        """Remove all hooks."""
        self._undoing.close()

    @override
    def iterate(self, loader: DataLoader[Any], start: Start) -> Iterator[Any]:
        return self._noting(start())

    @override
    def iterate_class(self, loader: DataLoader[Any], iteration: ClassIteration) -> Iterator[Any]:
        return self._noting(iteration.start())

    def _noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._loads = True
        for batch in batches:
            self._loads, self._evaluates = False, not torch.is_grad_enabled()
            if not self._evaluates:
                self._sums, self._states = batch_sums(batch), process_states()
                self._batches, self._draws = self._batches + 1, []
            yield batch
            self._loads = True
        self._loads = False

    def _note_draw(self, tensor: torch.Tensor, generator: torch.Generator | None, fill: Any, is_mask: bool) -> None:
        is_evaluations = self._evaluates and not torch.is_grad_enabled()
        is_loops = (self._is_here or in_backward()) and not self._loads
        if may_be_by_batch(tensor, generator) and is_loops and not is_evaluations:
            self._draws.append((tensor.shape, order_of(tensor)))

    @property
    def _is_here(self) -> bool:
        return self._place == (os.getpid(), threading.get_ident())

    def _begin(self, tensors: Any, grad_tensors: Any) -> Any:
        if self._is_here:
            self._losses = [float(loss.detach()) for loss in losses_among(tensors)]
            if self._is_last:
                self._finish(**self._numbers())
        return grad_tensors

    def _end(self) -> None:
        if not self._is_here or not self._parameters.in_order:
            return
        if self._is_last:  # gradients that the loop has computed itself
            self._finish(**self._numbers())
        while self._file.exists():
            time.sleep(0.005)
        self._parameters.refresh()
        parameters = self._parameters.in_order
        torch.save([parameter.grad for parameter in parameters], self._file)
        self._report(
            "backward",
            **self._numbers(),
            file=str(self._file),
            parameters=checksums(parameters),
            shapes=[parameter.shape for parameter in parameters],
        )
        self._reports += 1

    def _numbers(self) -> dict[str, Any]:
        """Return the losses of a backward, and by what the ranks know whether theirs are comparable."""
        _, *others = differing(self._states or process_states(), process_states())
        return {
            "losses": self._losses,
            "sums": self._sums,
            "random_state": random_state(),
            "drawn": any(others),  # by libraries other than torch
            "libraries": checksum_of_libraries(),
            "draws": self._draws,
            "batches": self._batches,
        }

    def _finish(self, **numbers: Any) -> None:
        if numbers:
            self._report("backward", **numbers)
        self._report("finished")
        os._exit(0)  # processes that it has started end with it

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Report the step, and before it, gradients that the loop has computed itself without a backward."""
        is_own = self._at_step.get(id(optimizer), 0) == self._reports and not in_backward()
        is_own = is_own and closure_of(args, kwargs) is None
        is_set_up = any(one is optimizer for one in self._parameters.optimizers)
        if is_own and is_set_up and any(parameter.grad is not None for parameter in held_by(optimizer)):
            self._losses = []
            self._end()
        if is_set_up and not (in_backward() or self._is_last) and closure_of(args, kwargs) is None:
            rates = rates_of([optimizer])
            norm = norm_of_gradients(held_by(optimizer))
            self._report("step", norm=norm, rates=rates, draws=self._draws, batches=self._batches)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_here:
            self._stepped[id(optimizer)] = optimizer
            self._at_step[id(optimizer)] = self._reports
            if all(id(one) in self._stepped for one in self._parameters.optimizers):
                if in_backward() or not self._reports:
                    self._finish()
                self._is_last = True


def losses_among(tensors: Any) -> list[torch.Tensor]:
    """Return the roots of a backward that are losses, that is, scalars."""
    roots = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    tensors = [root for root in roots if isinstance(root, torch.Tensor)]
    return [root for root in tensors if root.numel() == 1 and root.is_floating_point() and not root.is_leaf]
