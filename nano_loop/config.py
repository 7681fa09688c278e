"""The options of a run, from the code and from the environment, checked together."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nano_loop.environment import read_options, variable_of
from nano_loop.errors import NanoConfigError, problem, shown
from nano_loop.options import CHECKS, Auto, RefusedValueError


@dataclass(frozen=True)
class NanoConfig:
    """The options of `nano_loop.TorchNano` and `nano_loop.nano`, checked and in one spelling.

    Parameters
    ----------
    num_processes : int or None
        Data-parallel processes. None means 1, or what torchrun, SLURM or MPI says.
    use_ipex : bool
        Whether to run the kernels of Intel Extension for PyTorch.
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
    fused_optimizer, allocator, fast_dropout, fast_attention, fast_convolution, fast_fetch : bool or "auto"
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
    given : dict
        Each option as it was typed; not an option itself.
    from_environment : tuple of str
        Environment variables that overrode arguments, with their values; not an option itself.

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
    fast_convolution: Auto = "auto"
    fast_fetch: Auto = "auto"
    compile: bool | dict[str, Any] = False
    bf16_ops: Any = ()
    fp32_ops: Any = ()
    gradient_compression: str | None = None
    timeout: float = 600.0
    verbose: bool | Literal["all"] = True
    given: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    from_environment: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Check the arguments one by one, then together, and put each into its one spelling."""
        values = {name: getattr(self, name) for name in OPTIONS}
        given = {name: self.given.get(name) or shown(name, value) for name, value in values.items()}
        checked, problems = _checked(values, given)
        _raise_all(problems)
        for name, value in {**checked, "given": given}.items():
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
        overriding, unknown = read_options(environ, OPTIONS)
        given = {name: shown(name, value) for name, value in known.items()}
        given |= {name: variable for name, (variable, _) in overriding.items()}
        problems = [_unknown(name, shown(name, arguments[name]), OPTIONS) for name in arguments if name not in OPTIONS]
        problems += [_unknown(name, text, [variable_of(each) for each in OPTIONS]) for name, text in unknown.items()]
        values, more = _checked({**known, **{name: value for name, (_, value) in overriding.items()}}, given)
        _raise_all(problems + more)
        return cls(**values, given=given, from_environment=tuple(given[name] for name in overriding))

    def as_dict(self) -> dict[str, Any]:
        """Return every option by its name."""
        return {name: getattr(self, name) for name in OPTIONS}


OPTIONS = tuple(CHECKS)


def _checked(values: Mapping[str, Any], given: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values in their one spelling, and a sentence for each that cannot be used."""
    good, problems = {}, []
    for name, value in values.items():
        try:
            good[name] = CHECKS[name](value)
        except RefusedValueError as refused:
            problems.append(problem(given[name], *refused.args))
        except Exception as error:  # a user's object may raise anything when it is looked at
            raised = f"looking at it raised {type(error).__name__}"
            problems.append(problem(given[name], raised, "Pass a plain Python value"))
    return good, problems + _contradictions(good)


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    problems = []
    shares, count = values.get("cpu_for_each_process"), values.get("num_processes") or 1
    if shares is not None and "num_processes" in values and len(shares) != count:
        needed = f"it needs one for each process, and {shown('num_processes', values['num_processes'])}"
        problems.append(problem(f"cpu_for_each_process has {len(shares)} lists", needed, "Make the two agree"))
    both = set(values.get("bf16_ops", ())) & set(values.get("fp32_ops", ()))
    if both:
        named = f"{', '.join(sorted(both))} in both bf16_ops and fp32_ops"
        problems.append(problem(named, "an operator runs in one of the two", "Take it out of one of them"))
    return problems


def _unknown(name: str, given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return problem(given, "there is no such option", f"Write {close[0]}")
    return problem(given, f"there is no such option, only {', '.join(known)}", "Leave it out")


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise NanoConfigError("\n".join(problems))
