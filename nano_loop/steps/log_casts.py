"""Logs the casts of one step of the loop: their locations, dtypes, and the bytes that they moved."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from typing_extensions import override

from nano_loop.patching.lifetime import WeakIdKeyDictionary
from nano_loop.patching.operators import Kernel, overridden
from nano_loop.patching.patch_table import process_wide
from nano_loop.patching.torch_private import copy_as_torch, version
from nano_loop.patching.torch_private_autograd import current_node_number, in_backward, next_node_number
from nano_loop.patching.user_code import users_place
from nano_loop.runtime.objects.report import StepResult, print_lines
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.step import Step

#: Maximum number of lines of the text.
_MOST_LINES = 20
_MEGA = 1e6
_NAMES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
_TITLES = ("cast MB", "casts", "again", "cast", "part", "module", "line")
#: Between the dtype and the kind of a product that rounds its inputs.
_IN = " in "
_NUMBERS = 3  # number of right-aligned columns


@dataclass
class Logged:
    """The casts between two dtypes by a line of code in a module and a part of the loop."""

    source: str  # the dtypes, such as "fp32" and "bf16"
    target: str  # "bf16 in product" marks products that round their inputs
    part: str  # "backward", "optimizer", or "forward" for everything else
    module: str  # the innermost module whose call, or its backward, contained them; empty outside modules
    line: str  # that called torch, such as "train.py:12"; in a backward, the line of ``backward()``
    casts: int = 0  # the number of cast tensors, or of products
    again: int = 0  # those cast to the same dtype before in the same step, and not changed since
    cast_bytes: int = 0  # read and written by casts, or by products for inputs that they pack themselves


@dataclass(frozen=True)
class CastLog:
    """The casts of one step. The rows are sorted by the bytes that their casts moved."""

    rows: tuple[Logged, ...]

    def summary(self) -> str:
        """Return a one-line summary."""
        casts, again, cast_bytes = _totals(row for row in self.rows if _IN not in row.target)
        text = f"{casts:,} casts per step, {again:,} of them repeated, moved {cast_bytes / _MEGA:,.1f} MB"
        products, _, packed = _totals(row for row in self.rows if _IN in row.target)
        return f"{text}; {products:,} products round, and pack {packed / _MEGA:,.1f} MB" if products else text

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain lists, dicts, strings and numbers, for JSON."""
        return {"summary": self.summary(), "rows": [vars(row) for row in self.rows]}

    def __str__(self) -> str:
        lines = [_TITLES, *map(_cells, self.rows[:_MOST_LINES])]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_TITLES))]
        text = ["  ".join(_padded(line, widths)).rstrip() for line in lines]
        left = len(self.rows) - _MOST_LINES
        return "\n".join([self.summary(), *text, *([f"and {left} rows that move less"] if left > 0 else [])])


def _totals(rows: Iterable[Logged]) -> list[int]:
    rows = [*rows]
    return [sum(getattr(row, name) for row in rows) for name in ("casts", "again", "cast_bytes")]


class CastRecorder:
    """Records the casts of this thread, in modules with `names` by id, until `finish`, or the end of `ending`.

    Every cast ends in ``aten::copy_``, below autocast and autograd: composite operators compute as without a log.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._rows: dict[tuple[str, ...], Logged] = {}
        self._known: dict[tuple[Any, ...], StorageWeakRef] = {}
        self._modules: list[tuple[str, int]] = []  # the active calls, with the number of their first node
        self._nodes: list[tuple[int, int, str]] = []  # the nodes of the calls that have ended, innermost first
        self.in_optimizer = False  # whether casts are the optimizer's
        self.ending = ExitStack()
        self.ending.enter_context(overridden("copy_", _recording, "CPU"))
        self.ending.enter_context(self._calls_noted())
        _recorders[threading.get_ident()] = self
        self.ending.callback(_recorders.pop, threading.get_ident(), None)

    def finish(self) -> CastLog:
        """Stop, and return the log."""
        self.ending.close()
        return CastLog(tuple(sorted(self._rows.values(), key=lambda row: (-row.cast_bytes, row.line, row.module))))

    def record(self, target: Tensor, source: Tensor) -> None:
        """Record a copy if it is a cast between floating-point dtypes."""
        if source.dtype is target.dtype or not (source.is_floating_point() and target.is_floating_point()):
            return
        row = self._row(_name(source.dtype), _name(target.dtype))
        row.casts += 1
        row.again += self._is_again(source, target.dtype)
        row.cast_bytes += source.numel() * source.itemsize + target.numel() * target.itemsize

    def record_product(self, dtype: torch.dtype, kind: str, packed: int) -> None:
        """Record a product that rounds its inputs, and packs this many fp32 values in a dtype itself."""
        row = self._row(_NAMES[torch.float32], f"{_NAMES[dtype]}{_IN}{kind}")
        row.casts += 1
        row.cast_bytes += packed * (torch.float32.itemsize + dtype.itemsize)

    def _row(self, source: str, target: str) -> Logged:
        """Return the row for casts at the current place in the code."""
        line = users_place()
        where = "" if line is None else f"{os.path.basename(line.filename)}:{line.number}"
        key = (source, target, *self._place(), where)
        return self._rows.setdefault(key, Logged(*key))

    def _place(self) -> tuple[str, str]:
        """Return the part of the loop and the module."""
        if self.in_optimizer:
            return "optimizer", ""
        if not in_backward():
            return "forward", self._modules[-1][0] if self._modules else ""
        number = current_node_number()
        if number is None:
            return "backward", ""
        return "backward", next((name for start, end, name in self._nodes if start <= number < end), "")

    def _is_again(self, source: Tensor, dtype: torch.dtype) -> bool:
        """Whether a tensor with these contents was cast to this dtype before."""
        storage = StorageWeakRef(source.untyped_storage())  # type: ignore[no-untyped-call]
        view = (source.storage_offset(), source.shape, source.stride())
        key = (storage.cdata, version(source), view, source.dtype, dtype)
        is_known = key in self._known
        self._known[key] = storage  # keeps the address from being reused for another storage
        return is_known

    @contextmanager
    def _calls_noted(self) -> Iterator[None]:
        """Record the modules that this thread calls, and the autograd nodes that the calls create."""
        thread = threading.get_ident()

        def is_noted(module: nn.Module) -> bool:
            return id(module) in self._names and threading.get_ident() == thread and not torch.compiler.is_compiling()

        def begin(module: nn.Module, args: Any) -> None:
            if is_noted(module):
                self._modules.append((self._names[id(module)], next_node_number()))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if is_noted(module) and self._modules:
                name, start = self._modules.pop()
                self._nodes.append((start, next_node_number(), name))

        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(begin).remove)
            stack.callback(register_module_forward_hook(end, always_call=True).remove)
            yield


def record_product(dtype: torch.dtype, kind: str, packed: int) -> None:
    """Record a product in the recorder of this thread, if there is one."""
    recorder = _recorders.get(threading.get_ident())
    if recorder is not None:
        recorder.record_product(dtype, kind, packed)


_recorders: dict[int, CastRecorder] = process_wide("cast recorders, by thread", {})


def _recording(original: Kernel | None) -> Kernel:
    """Return the replacement of ``copy_``."""

    def copy(keys: torch.DispatchKeySet, target: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
        recorder = _recorders.get(threading.get_ident())
        if recorder is not None and isinstance(source, Tensor):  # it may be a number
            recorder.record(target, source)
        return copy_as_torch(target, source, non_blocking)

    return copy


def _name(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _cells(row: Logged) -> tuple[str, ...]:
    numbers = (f"{row.cast_bytes / _MEGA:,.2f}", f"{row.casts:,}", f"{row.again:,}")
    return (*numbers, f"{row.source} → {row.target}", row.part, row.module or "-", row.line or "-")


def _padded(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    pairs = list(zip(line, widths, strict=True))
    return [*(f"{cell:>{width}}" for cell, width in pairs[:_NUMBERS]), *(f"{c:<{w}}" for c, w in pairs[_NUMBERS:])]


#: The first steps are not representative: optimizers create their state, and products of new sizes are counted.
_AFTER_STEPS = 2


class LogCasts(Step):
    """Records the casts between the end of all optimizers' second step and that of the third, on rank 0."""

    name = "log_casts"
    needs = "optimizers"

    @override
    def begin(self) -> None:
        self._names: Any = WeakIdKeyDictionary()  # by module
        self._is_applied = False
        self._recorder: CastRecorder | None = None
        self._result: StepResult | None = None

    @override
    def observe(self, parts: TrainingObjects) -> None:
        if not self.enabled or self.options.compile:
            return  # hooks would make torch.compile recompile
        for model in parts.models:
            self._names.update({module: name or type(model).__name__ for name, module in model.named_modules()})

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if not self._is_applied and self.ranks.rank == 0:
            self._is_applied, count = True, len(parts.optimizers)
            self.undoing.callback(self.clock.before(lambda *_: self._mark(in_optimizer=True)))
            self.undoing.callback(self.clock.after(lambda _: self._mark(in_optimizer=False)))
            self.undoing.callback(self.clock.in_steps(_AFTER_STEPS * count, self._record))
            self.undoing.callback(self.clock.in_steps((_AFTER_STEPS + 1) * count, self._finish))
        return "of the third step"

    @override
    def final_result(self) -> StepResult | None:
        if not self._is_applied:
            return None
        return self._result or StepResult(self.name, "skipped", "fewer than three steps", code="few_steps")

    def _record(self) -> None:
        self._recorder = CastRecorder({id(module): name for module, name in self._names.items()})
        self.undoing.callback(self._recorder.ending.close)

    def _mark(self, in_optimizer: bool) -> None:
        if self._recorder is not None:
            self._recorder.in_optimizer = in_optimizer

    def _finish(self) -> None:
        if self._recorder is None:
            return
        log, self._recorder = self._recorder.finish(), None
        try:
            self._result = StepResult(self.name, "measured", log.summary() + self._written(log), log)
        except OSError as error:  # training continues without a log
            self._result = StepResult(self.name, "skipped", f"the log could not be written: {error}")
            return
        if self.options.log_casts is True and self.options.verbose:
            print_lines([log])

    def _written(self, log: CastLog) -> str:
        if self.options.log_casts is True:
            return ""
        path = Path(str(self.options.log_casts))
        path.write_text(json.dumps(log.as_dict(), indent=2) + "\n")
        return f", in {path.name}"
