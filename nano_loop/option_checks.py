"""Checks of option values: each returns the normalized value, or raises an error that names the allowed values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, Literal

import torch.distributed

from nano_loop.errors import problem, shown

_PRECISIONS = {
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    **{name: name for name in ("32-true", "64-true", "16-mixed", "bf16-mixed", "bf16-true", "auto")},
}

#: Takes any value, and returns its normalized form or raises a `RefusedValueError`.
Check = Callable[[Any], Any]
#: More than the maximum number of CPUs in Linux.
_TOO_MANY = 1 << 16


class RefusedValueError(Exception):
    """The allowed values, and what to do. The caller adds the name and the value of the option."""


def boolean(value: Any) -> bool:
    """Accept True and False."""
    if isinstance(value, bool):
        return value
    raise RefusedValueError("it must be True or False", "Pass one of the two")


def auto_or_boolean(value: Any) -> bool | Literal["auto"]:
    """Accept True, False and ``"auto"``."""
    if isinstance(value, bool) or (isinstance(value, str) and value == "auto"):
        return value  # type: ignore[return-value]
    raise RefusedValueError('it must be "auto", True or False', 'Leave it out for "auto", or pass one of the three')


def num_processes(value: Any) -> int | None:
    """Accept None and a number of processes."""
    if value is None:
        return None
    if _is_number(value, Integral) and 1 <= value < _TOO_MANY:
        return int(value)
    raise RefusedValueError(
        f"it must be None or an int from 1 to {_TOO_MANY - 1}", "Pass the number of processes, or leave it out for one"
    )


def distributed_backend(value: Any) -> str:
    """Accept the names of process launchers."""
    if isinstance(value, str) and value in ("subprocess", "spawn", "ray"):
        return "subprocess" if value == "spawn" else value
    raise RefusedValueError('it must be "subprocess" (also called "spawn") or "ray"', 'Leave it out for "subprocess"')


def process_group_backend(value: Any) -> str | None:
    """Accept None and the backends that this torch was built with."""
    if value is None:
        return None
    if isinstance(value, str) and value == "ccl":
        raise RefusedValueError("oneCCL's binding for torch is retired", "Leave it out for gloo")
    if isinstance(value, str) and _has_backend(value):
        return value
    raise RefusedValueError("it must be None or a backend that this torch was built with", "Leave it out for gloo")


def _has_backend(name: str) -> bool:
    if not torch.distributed.is_available() or name == torch.distributed.Backend.UNDEFINED:
        return False
    return name in torch.distributed.Backend.backend_list and torch.distributed.is_backend_available(name)


def precision(value: Any) -> str:
    """Accept BigDL-Nano's and Fabric's names of precisions, and return Fabric's."""
    if (isinstance(value, str) or _is_number(value, Integral)) and str(value) in _PRECISIONS:
        return _PRECISIONS[str(value)]
    allowed = 'it must be 32, 64, 16, "bf16", "auto" or one of Fabric\'s names: ' + ", ".join(
        dict.fromkeys(_PRECISIONS.values())
    )
    raise RefusedValueError(allowed, 'Pass "bf16" for speed, or leave it out for fp32')


def cpu_for_each_process(value: Any) -> tuple[tuple[int, ...], ...] | None:
    """Accept None and lists of CPU ids, and return tuples."""
    if value is None:
        return None
    if _is_list(value) and value and all(_is_list(ids) and ids and all(map(_is_cpu, ids)) for ids in value):
        return tuple(tuple(int(each) for each in ids) for ids in value)
    raise RefusedValueError(
        "it must be a list with a list of CPU ids for each process", "Pass a list such as [[0, 1], [2, 3]] for two"
    )


def compile_arguments(value: Any) -> bool | dict[str, Any]:
    """Accept True, False and a dict of arguments of `torch.compile`, which is copied."""
    if isinstance(value, bool):
        return value
    arguments = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    if isinstance(value, dict) and value and set(value) <= set(arguments):
        return dict(value)
    allowed = f"it must be True, False or a dict of torch.compile's arguments: {', '.join(arguments)}"
    raise RefusedValueError(allowed, 'Pass a dict such as {"mode": "max-autotune"}')


def operators(value: Any) -> tuple[str, ...]:
    """Accept names of ATen operators, and return a tuple."""
    if (_is_list(value) or isinstance(value, (set, frozenset))) and all(
        isinstance(name, str) and name for name in value
    ):
        return tuple(value)
    raise RefusedValueError("it must be a list of names of ATen operators", 'Pass a list such as ["layer_norm"]')


def gradient_compression(value: Any) -> str | None:
    """Accept None and ``"bf16"``."""
    if value is None or (isinstance(value, str) and value == "bf16"):
        return value
    raise RefusedValueError('it must be None or "bf16"', "Leave it out for exact averages")


def seconds(value: Any) -> float:
    """Accept a positive, finite number of seconds."""
    if _is_number(value, Real) and math.isfinite(value) and value > 0:
        return float(value)
    raise RefusedValueError("it must be a positive number of seconds", "Leave it out for ten minutes")


def verbosity(value: Any) -> bool | Literal["all"]:
    """Accept True, False and ``"all"``."""
    if isinstance(value, bool) or (isinstance(value, str) and value == "all"):
        return value  # type: ignore[return-value]
    raise RefusedValueError('it must be True, False or "all"', "Pass False to silence the report")


def contradictions(values: Mapping[str, Any]) -> list[str]:
    """Return a message for each contradiction between two options. `values` holds the valid options only."""
    problems = []
    shares, count = values.get("cpu_for_each_process"), values.get("num_processes") or 1
    if shares is not None and "num_processes" in values and len(shares) != count:
        needed = f"it needs one for each process, and {shown('num_processes', values['num_processes'])}"
        problems.append(problem(f"cpu_for_each_process has {len(shares)} lists", needed, "Make the two agree"))
    both = set(values.get("bf16_ops", ())) & set(values.get("fp32_ops", ()))
    if both:
        named = f"{', '.join(sorted(both))} in both bf16_ops and fp32_ops"
        problems.append(problem(named, "an operator runs in one of the two", "Remove it from one of them"))
    return problems


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, range)) and len(value) < _TOO_MANY


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_cpu(value: Any) -> bool:
    return _is_number(value, Integral) and bool(value >= 0)
