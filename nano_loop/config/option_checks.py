"""Checks of option values. Each returns the normalized value, or raises an error that lists the allowed values."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nano_loop.config.op_names import SAFE, operators_of, overloads_of, read_names
from nano_loop.config.precisions import OF_GPUS, PRECISIONS, SHORT_NAMES
from nano_loop.errors import error_message, quoted, shown

_PRECISIONS = {**SHORT_NAMES, **{name: name for name in PRECISIONS}}

#: Accepts any value, and returns its normalized form or raises a `RefusedValueError`.
Check = Callable[[Any], Any]
#: More than the maximum number of CPUs in Linux.
_TOO_MANY = 1 << 16
_LONGEST_TIMEOUT = 1_000_000_000  # seconds: 31 years


class RefusedValueError(Exception):
    """An error with the allowed values and a hint. The caller adds the name and the value of the option."""


def _one_of(*values: bool | str | None, hint: str) -> Check:
    """Return a check that accepts only these values."""
    *others, last = (f'"{value}"' if isinstance(value, str) else str(value) for value in values)

    def check(value: Any) -> Any:
        if any(isinstance(value, type(allowed)) and value == allowed for allowed in values):  # 1 is not True here
            return value
        raise RefusedValueError(f"it must be {', '.join(others)} or {last}", hint)

    return check


def _count(least: int, hint: str, *words: str) -> Check:
    """Return a check that accepts None, whole numbers and these words."""

    def check(value: Any) -> int | str | None:
        if value is None or (isinstance(value, str) and value in words):
            return value
        if _is_number(value, Integral) and least <= value < _TOO_MANY:
            return int(value)
        others = ", ".join(["None", *(f'"{word}"' for word in words)])
        raise RefusedValueError(f"it must be {others} or an int from {least} to {_TOO_MANY - 1}", hint)

    return check


boolean = _one_of(True, False, hint="Pass one of the two")
auto_or_boolean = _one_of("auto", True, False, hint="Pass one of the three")
verbosity = _one_of(True, False, "all", hint="Pass False to silence the report")
num_processes = _count(1, "Pass the number of processes, or omit it for one", "auto")
num_threads = _count(1, "Omit it for one thread per physical core", "auto")


def distributed_backend(value: Any) -> str:
    """Accept the names of process launchers."""
    if isinstance(value, str) and value in ("subprocess", "spawn", "k8s", "ray"):
        return "subprocess" if value == "spawn" else value
    allowed = 'it must be "subprocess" (also called "spawn"), "k8s" or "ray"'
    raise RefusedValueError(allowed, 'Omit it for "subprocess"')


_OMIT = "Omit it: ranks of one host use shared memory, and ranks of several hosts gloo"
_OURS = "nano_loop"  # registered with torch during runs; None selects it


def process_group_backend(value: Any) -> str | None:
    """Accept None and the backends that this torch was built with."""
    if value is None:
        return None
    if isinstance(value, str) and value == "ccl":
        raise RefusedValueError("oneCCL's binding for torch is retired", _OMIT)
    if isinstance(value, str) and _has_backend(value):
        return value
    raise RefusedValueError("it must be None or a backend that this torch was built with", _OMIT)


def _has_backend(name: str) -> bool:
    import torch.distributed  # imported here and below, since most options are checked without torch

    if not torch.distributed.is_available() or name in (torch.distributed.Backend.UNDEFINED, _OURS):
        return False
    return name in torch.distributed.Backend.backend_list and torch.distributed.is_backend_available(name)


def precision(value: Any) -> str:
    """Accept BigDL-Nano's and Fabric's names of precisions, and return Fabric's name."""
    name = str(value) if _is_number(value, Integral) and 0 < value < _TOO_MANY else value
    if isinstance(name, str) and name in _PRECISIONS:
        return _PRECISIONS[name]
    if isinstance(value, str) and value in OF_GPUS:
        raise RefusedValueError("it is only for GPUs", 'Pass "bf16" or "bf16-true"')
    allowed = 'it must be 32, 64, 16, "bf16", "auto" or one of Fabric\'s names: ' + ", ".join(
        dict.fromkeys(_PRECISIONS.values())
    )
    raise RefusedValueError(allowed, 'Pass "bf16" for speed, or omit it for fp32')


def fp32_or_bf16(value: Any) -> str:
    """Accept 32 and ``"bf16"``, and return a string."""
    if (isinstance(value, str) and value in ("32", "bf16")) or (_is_number(value, Integral) and value == 32):
        return str(value)
    raise RefusedValueError('it must be 32 or "bf16"', 'Pass "bf16" for half of the memory, or omit it for fp32')


def cpu_for_each_process(value: Any) -> tuple[tuple[int, ...], ...] | int | None:
    """Accept None, a number of CPUs, and lists of CPU ids. Lists are returned as tuples."""
    if value is None:
        return None
    if _is_number(value, Integral) and 1 <= value < _TOO_MANY:
        return int(value)
    if _is_list(value) and value and all(_is_list(ids) and ids and all(map(_is_cpu, ids)) for ids in value):
        return tuple(tuple(int(cpu) for cpu in ids) for ids in value)
    raise RefusedValueError(
        "it must be the number of CPUs of each process, or a list with a list of CPU ids for each process",
        "Pass 2, or a list such as [[0, 1], [2, 3]] for two processes",
    )


def compile_arguments(value: Any) -> bool | str | dict[str, Any]:
    """Accept True, False, ``"whole"`` and a dict of `torch.compile`'s arguments, which is copied."""
    if isinstance(value, bool) or (isinstance(value, str) and value == "whole"):
        return value
    import torch

    arguments = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    if isinstance(value, dict) and value and set(value) <= set(arguments):
        return dict(value)
    allowed = f'it must be True, False, "whole" or a dict of torch.compile\'s arguments: {", ".join(arguments)}'
    raise RefusedValueError(allowed, 'Pass a dict such as {"mode": "max-autotune"}')


def boolean_or_path(value: Any) -> bool | str:
    """Accept True, False and the path of a file that can be created. Return the path as an absolute one."""
    if isinstance(value, bool):
        return value
    allowed, advice = "it must be True, False or the path of a file", "Pass True for a table, or a path for JSON"
    if not isinstance(value, (str, os.PathLike)) or not value:
        raise RefusedValueError(allowed, advice)
    path = Path(os.fsdecode(value)).absolute()
    if not _may_be_written(path):
        raise RefusedValueError("it must be the path of a file in a folder that exists", advice)
    return str(path)


def _may_be_written(path: Path) -> bool:
    try:
        return (
            "\0" not in str(path)
            and not (path.is_dir() or path.is_fifo())  # opening a pipe waits for a reader
            and os.access(path if path.exists() else path.parent, os.W_OK)
        )
    except OSError:  # the name is too long
        return False


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B", re.ASCII)
_POWERS = " kMGT"


def _bytes_in(value: Any) -> int | None:
    """Return a number of bytes, which may be written as ``"8 GB"``; None if the value is invalid."""
    size = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    count = value
    if size is not None:
        power = _POWERS.index(size[2].replace("K", "k") or " ")
        count = float(size[1]) * (1024.0 if size[3] else 1000.0) ** power
    return int(count) if _is_number(count, Real) and 1 <= count < 1 << 62 else None


def memory_limit(value: Any) -> int | None:
    """Accept None, a number of bytes, and a size such as ``"8 GB"``."""
    count = _bytes_in(value)
    if value is None or count is not None:
        return count
    raise RefusedValueError('it must be None, a number of bytes or a size such as "8 GB"', "Omit it for no limit")


def image_cache(value: Any) -> int | str | None:
    """Accept None, ``"auto"``, a number of bytes, a size such as ``"8 GB"``, and a folder, made absolute."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return None
    if (count := _bytes_in(value)) is not None:
        return count
    if isinstance(value, (str, os.PathLike)) and _may_be_a_folder(os.fsdecode(value)):
        return str(Path(os.path.expanduser(os.fsdecode(value))).absolute())
    allowed = 'it must be None, a number of bytes, a size such as "8 GB", or a folder in one that exists'
    raise RefusedValueError(allowed, "Omit it for a quarter of the memory")


def _may_be_a_folder(text: str) -> bool:
    if not text or "\0" in text or (text[0].isdigit() and os.sep not in text):  # a misspelled size
        return False
    path = Path(os.path.expanduser(text)).absolute()  # pathlib's expanduser raises if the user has no home
    try:
        return path.is_dir() or (path.parent.is_dir() and not path.exists())
    except OSError:  # the name is too long
        return False


_OPERATORS = "it must be a list of names of operators, or the path of a file with one per line"


def operators(value: Any) -> tuple[str, ...]:
    """Accept names of operators, or the path of a file with names, and return the names."""
    return _named_operators(value, _OPERATORS, 'Pass a list such as ["softmax", "layer_norm"]')


def operators_or_safe(value: Any) -> tuple[str, ...]:
    """Accept the same as `operators`, and ``"safe"``, and return the names."""
    if isinstance(value, str) and value == "safe":
        return SAFE
    return _named_operators(value, f'{_OPERATORS}, or "safe"', 'Pass a list such as ["softmax"], or "safe"')


def _named_operators(value: Any, allowed: str, advice: str) -> tuple[str, ...]:
    names: Any = value
    if isinstance(value, str) and value == "safe":
        raise RefusedValueError('the list "safe" is for fp32_ops', advice)
    is_path = isinstance(value, str) and ("/" in value or os.sep in value or Path(value).suffix == ".txt")
    if is_path or isinstance(value, Path):
        names, allowed = _in_file(value), "each line of the file must have one operator's name, or a comment after #"
    elif isinstance(value, str):
        names = [name.strip() for name in value.split(",")]
    if not (_is_list(names) or isinstance(names, (set, frozenset))):
        raise RefusedValueError(allowed, advice)
    if not all(isinstance(name, str) and name for name in names):
        raise RefusedValueError(allowed, advice)
    if unknown := next((name for name in names if not operators_of(name)), None):
        hint = 'Write a name such as "softmax", "Tensor.mul" or "aten::addmm"'
        raise RefusedValueError(f"{allowed}. {quoted(unknown)!r}: torch has no such operator", hint)
    return tuple(dict.fromkeys(sorted(names) if isinstance(names, (set, frozenset)) else names))


def _in_file(path: str | Path) -> tuple[str, ...]:
    try:
        return read_names(Path(path))
    except (OSError, UnicodeDecodeError, ValueError) as error:  # ValueError: a null character
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        advice = "Pass names of operators, or the path of a file of them"
        raise RefusedValueError(f"the file cannot be read: {reason}", advice) from None


def seconds(value: Any) -> float:
    """Accept a positive number of seconds that the clocks of threads and sockets support."""
    if _is_number(value, Real) and 0 < value <= _LONGEST_TIMEOUT:
        return float(value)
    allowed = f"it must be a positive number of seconds, at most {_LONGEST_TIMEOUT:,}"
    raise RefusedValueError(allowed, "Omit it for ten minutes")


def worker_init(value: Any) -> Callable[[], object] | None:
    """Accept None and a callable without required arguments."""
    if value is None or (callable(value) and _takes_nothing(value)):
        return value  # type: ignore[no-any-return]
    allowed = "it must be None or a function that is called without arguments, neither async nor a generator"
    raise RefusedValueError(allowed, "Pass a function such as one that imports your_patches")


def _takes_nothing(value: Callable[..., Any]) -> bool:
    if inspect.iscoroutinefunction(value) or inspect.isgeneratorfunction(value):
        return False
    try:
        inspect.signature(value).bind()
    except ValueError:  # some builtins have no signature
        return True
    except TypeError:
        return False
    return True


def contradictions(values: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Return a message for each contradiction between valid options, with the names that the user used for them."""
    problems = []
    shares, count = values.get("cpu_for_each_process"), values.get("num_processes") or 1
    if count == "auto" and values.get("split_batches") is False:
        # With whole batches on each rank, the training differs, so measurements must not choose the number.
        expected = "a measured number of processes must compute the same as one process, so they must share each batch"
        got = shown(names["num_processes"], "auto")
        problems.append(error_message(got, expected, "Pass split_batches=True too, or a number"))
    if isinstance(shares, tuple) and "num_processes" in values and len(shares) != count:
        got = f"{names['cpu_for_each_process']} has {len(shares)} lists"
        expected = f"it needs one for each process, and {shown(names['num_processes'], values['num_processes'])}"
        problems.append(error_message(got, expected, "Make the two agree"))
    return [*problems, *_contradicting_lists(values, names)]


def _contradicting_lists(values: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[str]:
    bf16, fp32 = (_overloads(values.get(name, ())) for name in ("bf16_ops", "fp32_ops"))
    both = {bf16[overload] for overload in bf16.keys() & fp32.keys()}
    if both:
        named = f"{', '.join(sorted(both))} in both {names['bf16_ops']} and {names['fp32_ops']}"
        yield error_message(named, "an operator runs in one of the two", "Remove it from one of them")
    for name in ("bf16_ops", "fp32_ops"):
        if values.get(name) and values.get("compile"):
            lists = "compiled models use only torch's lists"
            yield error_message(f"{names[name]} with {names['compile']}", lists, "Remove one of the two")


def _overloads(names: Iterable[str]) -> dict[str, str]:
    """Return the names, keyed by the ATen overloads that they denote."""
    return {
        overload: name for name in names for operator in operators_of(name) for overload, _ in overloads_of(operator)
    }


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, range)) and len(value) < _TOO_MANY


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_cpu(value: Any) -> bool:
    return _is_number(value, Integral) and bool(value >= 0)
