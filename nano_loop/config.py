"""The options of a run, from the code and from the environment, checked together."""

from __future__ import annotations

import ast
import difflib
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from nano_loop.errors import NanoConfigError, NanoError, problem
from nano_loop.options import CHECKS, Auto, RefusedValueError

_PREFIX = "NANO_LOOP_"


@dataclass(frozen=True)
class NanoConfig:
    """The options of `nano_loop.TorchNano` and `nano_loop.nano`, checked and in one spelling.

    Parameters
    ----------
    num_processes : int or None
        Data-parallel processes. None means 1, or what torchrun, SLURM or MPI says.
    use_ipex : bool
        Whether to hand the models to Intel Extension for PyTorch.
    distributed_backend : {"subprocess", "ray"}
        Who starts the processes; ``"spawn"`` is another name for ``"subprocess"``.
    process_group_backend : str or None
        torch.distributed's backend; None means gloo.
    precision : str
        One of Fabric's names, or ``"auto"``; ``32``, ``64``, ``16`` and ``"bf16"`` are turned into them.
    cpu_for_each_process : tuple of tuples of int, or None
        The logical CPUs of each process.
    channels_last : bool
        Whether images are laid out as NHWC.
    auto_lr : bool
        Whether several processes scale the learning rate.
    fused_optimizer, allocator, fast_dropout, fast_attention, fast_fetch : bool or "auto"
        Whether the step of that name is applied: True or an error, False, or where it helps.
    compile : bool or dict
        Whether models are given to `torch.compile`; a dict is passed on to it.
    bf16_ops, fp32_ops : tuple of str
        Names of ATen operators that autocast is to run in bf16 or in fp32.
    gradient_compression : {None, "bf16"}
        What gradients are cast to between processes.
    timeout : float
        Seconds that a process waits for the others.
    verbose : bool or "all"
        Whether the report is printed, and with ``"all"`` what every process prints.
    from_environment : tuple of str
        Environment variables that overrode arguments; not an argument itself.

    Raises
    ------
    NanoConfigError
        Names every argument that cannot be used, with its value, what is allowed, and what to do.
    """

    num_processes: int | None = None
    use_ipex: bool = False
    distributed_backend: str = "subprocess"
    process_group_backend: str | None = None
    precision: Any = 32
    cpu_for_each_process: Any = None
    channels_last: bool = False
    auto_lr: bool = True
    fused_optimizer: Auto = "auto"
    allocator: Auto = "auto"
    fast_dropout: Auto = "auto"
    fast_attention: Auto = "auto"
    fast_fetch: Auto = "auto"
    compile: bool | dict[str, Any] = False
    bf16_ops: Any = ()
    fp32_ops: Any = ()
    gradient_compression: str | None = None
    timeout: float = 600.0
    verbose: bool | Literal["all"] = True
    from_environment: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Check the arguments one by one, then together, and put each into its one spelling."""
        values, problems = _checked({name: getattr(self, name) for name in OPTIONS})
        _raise_all(problems)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> NanoConfig:
        """Make the options of a call; the environment wins over its arguments.

        Parameters
        ----------
        arguments : mapping
            What was passed, by name; also names that are no options.
        environ : mapping
            Holds options as ``NANO_LOOP_<OPTION>``.
        """
        known = {name: value for name, value in arguments.items() if name in OPTIONS}
        problems = [_unknown(name, value) for name, value in arguments.items() if name not in OPTIONS]
        overriding = {}
        for variable in sorted(name for name in environ if name.startswith(_PREFIX)):
            name = variable.removeprefix(_PREFIX).lower()
            if name in OPTIONS:
                overriding[name] = _read(environ[variable])
            else:
                problems.append(_unknown(variable, environ[variable], [_PREFIX + each.upper() for each in OPTIONS]))
        values, more = _checked({**known, **overriding})
        _raise_all(problems + more)
        variables = tuple(f"{_PREFIX}{name.upper()}={environ[_PREFIX + name.upper()]}" for name in overriding)
        return cls(**values, from_environment=variables)

    def as_dict(self) -> dict[str, Any]:
        """Return every option by its name."""
        return {name: getattr(self, name) for name in OPTIONS}


OPTIONS = tuple(each.name for each in fields(NanoConfig) if each.name != "from_environment")


def _checked(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values in their one spelling, and a sentence for each that cannot be used."""
    good, problems = {}, []
    for name, value in values.items():
        try:
            good[name] = CHECKS[name](value)
        except RefusedValueError as refused:
            problems.append(problem(_given(name, value), *refused.args))
    problems += _contradictions(good)
    return good, problems


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    problems = []
    shares, count = values.get("cpu_for_each_process"), values.get("num_processes") or 1
    if shares is not None and len(shares) != count:
        needed = f"it needs {count}, a list for each of num_processes={count}"
        problems.append(problem(f"cpu_for_each_process has {len(shares)} lists", needed, "Make the two agree"))
    both = set(values.get("bf16_ops", ())) & set(values.get("fp32_ops", ()))
    if both:
        given = f"{', '.join(sorted(both))} in both bf16_ops and fp32_ops"
        problems.append(problem(given, "an operator runs in one of the two", "Take it out of one of them"))
    return problems


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise NanoConfigError("\n".join(problems))


def _unknown(name: str, value: Any, known: Sequence[str] = OPTIONS) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"Write {close[0]}" if close else "Leave it out"
    return problem(_given(name, value), f"there is no such option, only {', '.join(known)}", advice)


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def _given(name: str, value: Any) -> str:
    return f"{name}={_repr.repr(value)}"


def _read(text: str) -> Any:
    """Read an option's value as it stands in an environment variable: a word, a Python literal or a list of names."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.strip()


# --- what this version does not do yet ---


def refuse_what_is_not_in_this_version(config: NanoConfig, world_size: int) -> None:
    """Raise a `NanoError` that names every option that a later version will honour.

    Parameters
    ----------
    config : NanoConfig
        The options.
    world_size : int
        The number of processes that torchrun, SLURM or MPI has started, 1 without them.
    """
    asked = {
        f"num_processes={config.num_processes}": (config.num_processes or 1) > 1,
        f"a launch of {world_size} processes": world_size > 1,
        "use_ipex=True": config.use_ipex,
        'distributed_backend="ray"': config.distributed_backend == "ray",
        f"precision={config.precision!r}": config.precision in ("64-true", "16-mixed", "bf16-true"),
        "cpu_for_each_process": config.cpu_for_each_process is not None,
        "fast_attention=True": config.fast_attention is True,
        "bf16_ops": bool(config.bf16_ops),
        "fp32_ops": bool(config.fp32_ops),
        "gradient_compression": config.gradient_compression is not None,
    }
    missing = [name for name, is_asked in asked.items() if is_asked]
    if missing:
        allowed = 'this version trains in one process, with precision 32, "bf16" or "auto"'
        raise NanoError(problem(f"{', '.join(missing)}: not in this version of nano_loop", allowed, "Leave it out"))
