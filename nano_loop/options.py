"""What each option may be: one check an option, each alone."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal

import torch.distributed

_PRECISIONS = {
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    **{name: name for name in ("32-true", "64-true", "16-mixed", "bf16-mixed", "bf16-true", "auto")},
}
Auto = bool | Literal["auto"]


class RefusedValueError(Exception):
    """What is allowed, and what to do next; whoever catches it knows the option's name and value."""


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise RefusedValueError("it is True or False", "Pass one of the two")


def _auto_or_boolean(value: Any) -> Auto:
    if isinstance(value, bool) or (isinstance(value, str) and value == "auto"):
        return value  # type: ignore[return-value]
    raise RefusedValueError('it is "auto", True or False', 'Leave it out, which means "auto", or pass one of the three')


def _num_processes(value: Any) -> int | None:
    if value is None:
        return None
    if _is_number(value, Integral) and 1 <= value < _TOO_MANY:
        return int(value)
    raise RefusedValueError(
        f"it is None or an int from 1 to {_TOO_MANY - 1}", "Pass the number of processes, or leave it out for one"
    )


def _distributed_backend(value: Any) -> str:
    if isinstance(value, str) and value in ("subprocess", "spawn", "ray"):
        return "subprocess" if value == "spawn" else value
    raise RefusedValueError(
        'it is "subprocess" (also called "spawn") or "ray"', 'Leave it out, which means "subprocess"'
    )


def _process_group_backend(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and value == "ccl":
        raise RefusedValueError("oneCCL's binding for torch is retired", "Leave it out, which means gloo")
    if isinstance(value, str) and _has_backend(value):
        return value
    raise RefusedValueError("it is None or a backend that this torch was built with", "Leave it out, which means gloo")


def _has_backend(name: str) -> bool:
    if not torch.distributed.is_available() or name == torch.distributed.Backend.UNDEFINED:
        return False
    return name in torch.distributed.Backend.backend_list and torch.distributed.is_backend_available(name)


def _precision(value: Any) -> str:
    if (isinstance(value, str) or _is_number(value, Integral)) and str(value) in _PRECISIONS:
        return _PRECISIONS[str(value)]
    allowed = 'it is 32, 64, 16, "bf16", "auto" or one of Fabric\'s names: ' + ", ".join(
        dict.fromkeys(_PRECISIONS.values())
    )
    raise RefusedValueError(allowed, 'Pass "bf16" for speed, or leave it out for fp32')


def _cpu_for_each_process(value: Any) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    if _is_list(value) and value and all(_is_list(ids) and ids and all(map(_is_cpu, ids)) for ids in value):
        return tuple(tuple(int(each) for each in ids) for ids in value)
    raise RefusedValueError(
        "it is a list with a list of CPU ids for each process", "Pass such as [[0, 1], [2, 3]] for two"
    )


def _compile(value: Any) -> bool | dict[str, Any]:
    if isinstance(value, bool):
        return value
    arguments = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    if isinstance(value, dict) and value and set(value) <= set(arguments):
        return dict(value)
    allowed = f"it is True, False or a dict of torch.compile's arguments: {', '.join(arguments)}"
    raise RefusedValueError(allowed, 'Pass such as {"mode": "max-autotune"}')


def _operators(value: Any) -> tuple[str, ...]:
    if (_is_list(value) or isinstance(value, (set, frozenset))) and all(
        isinstance(name, str) and name for name in value
    ):
        return tuple(value)
    raise RefusedValueError("it is a list of the names of ATen operators", 'Pass such as ["layer_norm"]')


def _gradient_compression(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value == "bf16"):
        return value
    raise RefusedValueError('it is None or "bf16"', "Leave it out for exact averages")


def _timeout(value: Any) -> float:
    if _is_number(value, Real) and math.isfinite(value) and value > 0:
        return float(value)
    raise RefusedValueError("it is a positive number of seconds", "Leave it out, which means ten minutes")


def _verbose(value: Any) -> bool | Literal["all"]:
    if isinstance(value, bool) or (isinstance(value, str) and value == "all"):
        return value  # type: ignore[return-value]
    raise RefusedValueError('it is True, False or "all"', "Pass False to silence the report")


CHECKS: dict[str, Callable[[Any], Any]] = {
    "num_processes": _num_processes,
    "use_ipex": _boolean,
    "distributed_backend": _distributed_backend,
    "process_group_backend": _process_group_backend,
    "precision": _precision,
    "cpu_for_each_process": _cpu_for_each_process,
    "channels_last": _boolean,
    "auto_lr": _boolean,
    "fused_optimizer": _auto_or_boolean,
    "allocator": _auto_or_boolean,
    "fast_dropout": _auto_or_boolean,
    "fast_attention": _auto_or_boolean,
    "fast_convolution": _auto_or_boolean,
    "fast_fetch": _auto_or_boolean,
    "compile": _compile,
    "bf16_ops": _operators,
    "fp32_ops": _operators,
    "gradient_compression": _gradient_compression,
    "timeout": _timeout,
    "verbose": _verbose,
}


#: Options that are on or off, which an environment variable may say with 1 and 0.
SWITCHES = frozenset(
    name for name, check in CHECKS.items() if check in (_boolean, _auto_or_boolean, _compile, _verbose)
)
#: Options that are lists of names.
LISTS = frozenset(name for name, check in CHECKS.items() if check is _operators)
#: More CPUs than Linux knows.
_TOO_MANY = 1 << 16


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, range)) and len(value) < _TOO_MANY


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_cpu(value: Any) -> bool:
    return _is_number(value, Integral) and bool(value >= 0)
