"""A log of the casts of one step: which operator caused them, in which dtypes it ran, and the bytes that they moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano_loop.precision.execution_trace import Operator, Used

#: How many lines the text has.
_MOST_LINES = 20
_MEGA = 1e6

#: Copy a tensor, or a list of tensors, into another. Each cast ends in one of them.
_COPIES = ("copy_", "_foreach_copy_")
#: Move no bytes.
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")


@dataclass
class Logged:
    """The calls of one operator in one part of the loop with the same dtypes.

    Attributes
    ----------
    operator : str
        ATen's name, such as ``"linear"``. ``"to"`` is a cast that the code itself has written, or its backward.
    part : {"forward", "backward", "optimizer"}
        The part of the loop. What is in no backward and in no optimizer's step is "forward".
    inputs : str
        The dtypes of its floating-point inputs, such as ``"fp32"`` or ``"bf16, fp32"``, as it was called.
    ran_in : str
        Those of its inputs when it ran, after autocast.
    outputs : str
        Those of its outputs.
    calls : int
        The number of calls.
    casts : int
        The tensors that these calls have cast.
    again : int
        How many of these had been cast to the same dtype before, in the same step, and not changed since.
    cast_bytes : int
        What casts have read and written.
    nbytes : int
        The size of all inputs and outputs, casts not counted. Views and allocations move nothing.
    modules : dict
        How many casts, by the module; for a row without casts, how many calls.
    """

    operator: str
    part: str
    inputs: str
    ran_in: str
    outputs: str
    calls: int = 0
    casts: int = 0
    again: int = 0
    cast_bytes: int = 0
    nbytes: int = 0
    modules: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**vars(self), "modules": dict(self.modules.most_common())}


@dataclass(frozen=True)
class CastLog:
    """The casts of one step.

    Attributes
    ----------
    rows : tuple of Logged
        Sorted by the bytes that their casts have moved, then by the bytes of their tensors.
    """

    rows: tuple[Logged, ...]

    def summary(self) -> str:
        """Return one line."""
        calls, casts, again, cast_bytes, nbytes = (
            sum(getattr(row, name) for row in self.rows) for name in ("calls", "casts", "again", "cast_bytes", "nbytes")
        )
        moved = f"{cast_bytes / _MEGA:,.1f} of {(cast_bytes + nbytes) / _MEGA:,.1f} MB"
        return f"{casts:,} casts by {calls:,} operators in a step, {again:,} of them again, moved {moved}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain lists, dicts, strings and numbers, for JSON."""
        return {"summary": self.summary(), "rows": [row.as_dict() for row in self.rows]}

    def __str__(self) -> str:
        titles = ("cast MB", "casts", "again", "calls", "operator", "part", "inputs", "ran in", "outputs", "modules")
        shown = self.rows[:_MOST_LINES]
        lines = [titles, *map(_cells, shown)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
        text = ["  ".join(_padded(line, widths)).rstrip() for line in lines]
        left = len(self.rows) - len(shown)
        return "\n".join([self.summary(), *text, *([f"and {left} rows that move less"] if left else [])])


def cast_log(operators: Iterable[Operator]) -> CastLog:
    """Return the log of a step, from the operators that the loop has called."""
    rows: dict[tuple[str, ...], Logged] = {}
    known = _Known()
    for operator in operators:
        runs_as = _innermost_of_its_name(operator)
        dtypes = _dtypes(operator.inputs), _dtypes(runs_as.inputs), _dtypes(operator.outputs or operator.inputs[:1])
        key = (operator.name, operator.part, *dtypes)
        _add(rows.setdefault(key, Logged(*key)), operator, known)
    return CastLog(tuple(sorted(rows.values(), key=lambda row: (-row.cast_bytes, -row.nbytes, row.operator))))


def _add(row: Logged, operator: Operator, known: _Known) -> None:
    row.calls += 1
    casts, again = 0, 0
    for each in operator.all():
        for source, target in _casts(each):
            casts += 1
            again += known.is_again(source, target.dtype)
            row.cast_bytes += source.nbytes + target.nbytes
        known.note_written(each)
    row.casts += casts
    row.again += again
    if not (casts and operator.name in ("to", "_to_copy", *_COPIES)):
        row.nbytes += _moved(operator)
    if casts:
        if row.casts == casts:  # the first that casts
            row.modules.clear()
        row.modules[operator.module] += casts
    elif not row.casts:
        row.modules[operator.module] += 1


class _Known:
    """Which tensors have been cast, and not changed since."""

    def __init__(self) -> None:
        self._casts: dict[int, set[str]] = {}

    def is_again(self, source: Used, dtype: str) -> bool:
        dtypes = self._casts.setdefault(source.key, set())
        found = dtype in dtypes
        dtypes.add(dtype)
        return found

    def note_written(self, operator: Operator) -> None:
        """Forget what an operator has written to, or has made: another tensor may have had its number."""
        for each in operator.outputs:
            self._casts.pop(each.key, None)


def _casts(operator: Operator) -> Iterator[tuple[Used, Used]]:
    """Yield the source and the target of each tensor that an operator itself casts."""
    if operator.name not in _COPIES:
        return
    if any(each.name in _COPIES for each in operator.inner):
        return  # a list that is copied tensor by tensor
    targets, sources = operator.inputs[: (half := len(operator.inputs) // 2)], operator.inputs[half:]
    for target, source in zip(targets, sources, strict=True):
        if source.is_floating_point and target.is_floating_point and source.dtype != target.dtype:
            yield source, target


def _innermost_of_its_name(operator: Operator) -> Operator:
    """Return the call that runs it: autocast calls an operator again, with the inputs that it has cast."""
    inner = next((each for each in operator.inner if each.name == operator.name), None)
    return operator if inner is None else _innermost_of_its_name(inner)


def _moved(operator: Operator) -> int:
    """Return the bytes of an operator's inputs and outputs, or 0 if it makes a view or memory without contents."""
    read = {each.storage for each in operator.inputs}
    is_view = operator.outputs and all(each.storage in read for each in operator.outputs)
    if operator.name in _ALLOCATIONS or (is_view and not operator.name.endswith("_")):
        return 0
    return sum(each.nbytes for each in (*operator.inputs, *operator.outputs))


def _dtypes(tensors: Sequence[Used]) -> str:
    found = dict.fromkeys(each.dtype for each in tensors if each.is_floating_point)
    return ", ".join(found) or "-"


def _cells(row: Logged) -> tuple[str, ...]:
    numbers = (f"{row.cast_bytes / _MEGA:,.2f}", *(f"{each:,}" for each in (row.casts, row.again, row.calls)))
    (module, _), *others = row.modules.most_common()
    where = f"{module or '-'} and {len(others)} more" if others else module
    return (*numbers, row.operator, row.part, row.inputs, row.ran_in, row.outputs, where)


_NUMBERS = 4


def _padded(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    pairs = list(zip(line, widths, strict=True))
    return [*(f"{cell:>{width}}" for cell, width in pairs[:_NUMBERS]), *(f"{c:<{w}}" for c, w in pairs[_NUMBERS:])]
