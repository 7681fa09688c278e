"""Record the operators of a part of a loop: their tensors, and the module or the part of the loop of each.

torch's `ExecutionTraceObserver` records them in C++. A Python dispatch mode would see the same, but autocast locks its
cache while it casts a weight, and Python code in that cast would wait for the interpreter while holding the lock.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ExecutionTraceObserver, record_function

from nano_loop.cpu.native_output import without_lines

#: The names of torch's dtypes in a trace, and here.
DTYPES = {
    "float": "fp32",
    "double": "fp64",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
}

_MODULE = "nano_loop: module "
_BEGIN = "nano_loop: begin of a trace"
_OPTIMIZER = "Optimizer.step#"  # torch's own mark
_ENGINE = "autograd::engine::"  # casts and adds gradients between the functions of a backward pass
_LINES_OF_TORCH = b"execution_trace_observer.cpp"
_BACKWARD_FUNCTION = 1  # at::RecordScope
_FIELDS = 5  # tensor, storage, offset, elements, bytes of an element


@dataclass(frozen=True)
class Used:
    """A tensor that an operator reads or writes.

    Attributes
    ----------
    key : int
        An id of the tensor object. Another tensor may have it after this one is freed.
    storage : int
        An id of its storage, likewise.
    dtype : str
        ``"fp32"``, ``"bf16"`` and so on, or torch's name in C++ if it is not floating-point.
    numel, itemsize : int
        The number of elements, and the bytes of one.
    """

    key: int
    storage: int
    dtype: str
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        return self.numel * self.itemsize

    @property
    def is_floating_point(self) -> bool:
        """Whether autocast may cast it."""
        return self.dtype in DTYPES.values()


@dataclass
class Operator:
    """One call of an operator.

    Attributes
    ----------
    name : str
        Its name without ``aten::``, such as ``"linear"``.
    inputs, outputs : tuple of Used
        The tensors of its arguments (including those in lists) and results.
    part : {"forward", "backward", "optimizer"}
        The part of the loop. Everything outside backward passes and optimizer steps is "forward".
    module : str
        The innermost module in whose call, or in whose backward pass, it ran. Empty outside modules.
    inner : list of Operator
        The operators that it called, in order.
    """

    name: str
    inputs: tuple[Used, ...]
    outputs: tuple[Used, ...]
    part: str = "forward"
    module: str = ""
    inner: list[Operator] = field(default_factory=list)

    def all(self) -> Iterator[Operator]:
        """Yield this operator and the operators that it called, in the order of their start."""
        yield self
        for each in self.inner:
            yield from each.all()


# Deleting an observer removes the process's observer, even if that is another one.
_in_vain: list[ExecutionTraceObserver] = []


class Recorder:
    """Records the operators of this thread, from its creation until `finish` or `close`.

    Parameters
    ----------
    names : mapping of int to str
        The modules to note, by their ids.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._observer = ExecutionTraceObserver()
        self._ending = ExitStack()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        folder = self._ending.enter_context(tempfile.TemporaryDirectory(prefix="nano_loop-"))
        self._file = Path(folder) / "trace.json"
        with without_lines(2, _LINES_OF_TORCH):
            self._observer.register_callback(str(self._file))
            #: Whether torch records. A process has at most one observer, so another one may prevent this.
            self.is_recording = self._file.exists()
            if not self.is_recording:
                _in_vain.append(self._observer)
                return
            self._ending.callback(self._stop)
            self._observer.start()
        with record_function(_BEGIN):
            pass
        self._ending.enter_context(_steps_marked())
        self._ending.enter_context(_calls_marked(self._names))

    def finish(self) -> list[Operator]:
        """Stop, and return the outermost operators, in order.

        Raises
        ------
        OSError, ValueError
            If the trace cannot be read, for example because the disk is full.
        """
        if not self.is_recording:
            return []
        try:
            self._stop()
            text = self._file.read_text()
        finally:
            self.close()
        return read_trace(json.loads(text), self._names)

    def close(self) -> None:
        """Stop without a result. Has no effect after `finish`."""
        self._ending.close()

    def _stop(self) -> None:
        with without_lines(2, _LINES_OF_TORCH):
            self._observer.unregister_callback()


@contextmanager
def _steps_marked() -> Iterator[None]:
    """Mark the steps of optimizers as torch does: nano_loop's own steps only have the mark under a profiler."""
    marks: list[Any] = []

    def begin(optimizer: Optimizer, *_: Any) -> None:
        marks.append(record_function(f"{_OPTIMIZER}{type(optimizer).__name__}.step"))
        marks[-1].__enter__()

    def end(*_: Any) -> None:
        marks.pop().__exit__(None, None, None)

    hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _calls_marked(names: Mapping[int, str]) -> Iterator[None]:
    """Mark this thread's calls of the modules in the trace."""
    thread = threading.get_ident()
    open_marks: list[AbstractContextManager[None]] = []

    def concerned(module: nn.Module) -> bool:
        return id(module) in names and threading.get_ident() == thread and not torch.compiler.is_compiling()

    def begin(module: nn.Module, args: Any) -> None:
        if concerned(module):
            # Not the name itself: torch does not escape quotes in names, which is invalid JSON.
            mark: AbstractContextManager[None] = record_function(f"{_MODULE}{id(module)}")
            mark.__enter__()
            open_marks.append(mark)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if concerned(module) and open_marks:
            open_marks.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(begin).remove)
        stack.callback(register_module_forward_hook(end, always_call=True).remove)
        yield
        while open_marks:
            open_marks.pop().__exit__(None, None, None)


def read_trace(trace: Mapping[str, Any], names: Mapping[int, str]) -> list[Operator]:
    """Return the outermost operators of the thread that started a trace.

    Parameters
    ----------
    trace : mapping
        The trace, as torch writes it in JSON: a list of ``nodes``, each with its parent in ``ctrl_deps``.
    names : mapping of int to str
        The modules by their ids, which are in the marks of their calls.
    """
    nodes = {node["id"]: _Node(node) for node in sorted(trace["nodes"], key=lambda node: node["id"])}
    begin = next(node for node in nodes.values() if node.name == _BEGIN)
    return _Reader(nodes, begin.thread, names).outermost


class _Node:
    """A node of the trace: an operator, an autograd function, or a mark."""

    def __init__(self, node: Mapping[str, Any]) -> None:
        attributes = {each["name"]: each["value"] for each in node["attrs"]}
        self.name: str = node["name"]
        self.parent: int = node["ctrl_deps"]
        self.thread = attributes.get("tid")
        self.sequence: int = attributes.get("seq_id", -1)
        self.is_backward = attributes.get("scope") == _BACKWARD_FUNCTION
        self.json = node

    @property
    def is_operator(self) -> bool:
        return "::" in self.name and not self.is_backward and not self.name.startswith((_ENGINE, _MODULE))

    def operator(self) -> Operator:
        inputs, outputs = (tuple(_tensors(self.json[name])) for name in ("inputs", "outputs"))
        return Operator(self.name.removeprefix("aten::"), inputs, outputs)


@dataclass(frozen=True)
class _Place:
    """The position of a node: its part of the loop, its module, and its operator."""

    part: str = "forward"
    module: str = ""
    operator: Operator | None = None


class _Reader:
    """Nests the operators of one thread, in the order of their start."""

    def __init__(self, nodes: Mapping[int, _Node], thread: Any, names: Mapping[int, str]) -> None:
        self.outermost: list[Operator] = []
        self._names = names
        self._modules: dict[int, str] = {}  # of the autograd nodes, by their numbers
        places: dict[int, _Place] = {}
        for key, node in nodes.items():
            if node.thread == thread:
                places[key] = self._placed(node, places.get(node.parent, _Place()))

    def _placed(self, node: _Node, around: _Place) -> _Place:
        if node.is_backward:
            return _Place("backward", self._modules.get(node.sequence, ""), around.operator)
        if node.name.startswith(_MODULE):
            return _Place(around.part, self._names[int(node.name.removeprefix(_MODULE))], around.operator)
        if node.name.startswith(_OPTIMIZER):
            return _Place("optimizer", "", around.operator)
        if node.name.startswith(_ENGINE):
            return _Place("backward", "", around.operator)
        if not node.is_operator:
            return around
        if node.sequence >= 0 and around.part == "forward":
            self._modules[node.sequence] = around.module  # the last one that starts with this number creates the node
        operator = node.operator()
        operator.part, operator.module = around.part, around.module
        (self.outermost if around.operator is None else around.operator.inner).append(operator)
        return _Place(around.part, around.module, operator)


def _tensors(values: Mapping[str, Any]) -> Iterator[Used]:
    for kind, value in zip(values["types"], values["values"], strict=True):
        yield from _tensors_in(kind, value)


def _tensors_in(kind: str, value: Any) -> Iterator[Used]:
    if kind.startswith("GenericList["):
        for each_kind, each in zip(kind[len("GenericList[") : -1].split(","), value, strict=False):
            yield from _tensors_in(each_kind, each)
    elif kind.startswith("Tensor(") and isinstance(value, list) and len(value) >= _FIELDS and value[4]:
        dtype = kind[len("Tensor(") : -1]
        yield Used(value[0], value[1], DTYPES.get(dtype, dtype), value[3], value[4])
