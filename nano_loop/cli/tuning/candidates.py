"""The candidates of a search: a fixed list of options that may be faster than the user's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from nano_loop.config.declarations import DEFAULTS, EXACT
from nano_loop.config.options import Options
from nano_loop.cpu import Machine, process_counts

Changes = dict[str, Any]

#: The steps that are on by default if they apply.
STEPS_BY_DEFAULT = tuple(name for name, default in DEFAULTS.items() if default == "auto")
#: These may change results beyond rounding; the others change rounding errors at most.
OF_NUMBERS = ("precision", "channels_last", "use_ipex", "compile")
#: These change the order of sums, or the random numbers that a loader draws.
_OF_ORDER = ("num_processes", "num_threads")
_FEW = 4  # cores: with more, one thread is never the fastest for a step that is worth measuring


def candidates(options: Options, machine: Machine, fixed: Collection[str], answer: Mapping[str, Any]) -> list[Changes]:
    """Return the changes to the user's options, except `fixed` ones, to try; those that start slowly are last."""
    fixed = {*fixed, *EXACT, *_OF_ORDER} if options.exact else fixed
    if options.num_processes == "auto" and not options.exact:  # search only for this one
        cores = options.cpu_for_each_process if isinstance(options.cpu_for_each_process, int) else 1
        counts = [count for count in process_counts(machine)[1:] if count * cores <= machine.num_threads]
        return [{"num_processes": count} for count in counts]
    layouts = [False, True] if answer["has_convolutions"] else [options.channels_last]
    precisions = ["32-true", *["bf16-mixed"] * machine.has_fast_bf16]
    combined = [{"precision": precision, "channels_last": layout} for precision in precisions for layout in layouts]
    # The fastest choice on most machines: products that are too small to gain from bf16 stay in fp32.
    base = {"precision": "bf16-products" if machine.has_fast_bf16 else "32-true", "channels_last": layouts[-1]}
    more = [{}, *_processes(options, machine.num_threads), *_steps(options), *_ipex(options)]
    more.append({"compile": not options.compile})
    return [*_distinct([*combined, *({**base, **change} for change in more)], options, fixed)]


def _processes(options: Options, cores: int) -> Iterator[Changes]:
    if options.cpu_for_each_process is None:
        counts = dict.fromkeys([1, 2, cores // 4])
        yield from ({"num_processes": count, "num_threads": None} for count in counts if 0 < count <= cores)
    fewer = dict.fromkeys([cores // 2, *([1] if cores <= _FEW else [])])
    yield from ({"num_processes": None, "num_threads": count} for count in fewer if 0 < count < cores)


def _steps(options: Options) -> Iterator[Changes]:
    """Yield the change that enables the steps that the user disabled, and the one that disables all others."""
    off = [name for name in STEPS_BY_DEFAULT if getattr(options, name) is False]
    yield dict.fromkeys(off, "auto")
    yield {name: False for name in STEPS_BY_DEFAULT if name not in off}


def _ipex(options: Options) -> Iterator[Changes]:
    if find_spec("intel_extension_for_pytorch") is not None:
        yield {"use_ipex": not options.use_ipex}


def _distinct(proposals: Iterable[Changes], options: Options, fixed: Collection[str]) -> Iterator[Changes]:
    """Yield the effective changes of the proposals to the options, without duplicates."""
    present = options.as_dict()
    seen: list[Changes] = [{}]
    for proposal in proposals:
        changes = {
            name: value
            for name, value in proposal.items()
            if name not in fixed and _value(name, value) != _value(name, present[name])
        }
        if changes not in seen:
            seen.append(changes)
            yield changes


def _value(name: str, value: Any) -> Any:
    """Return a value that is equal for equivalent choices: one process is the same as None."""
    return value or 1 if name == "num_processes" else value
