"""The options: name, type, default, check and help of each. Signatures and docstrings are generated from them."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal

from nano_loop import option_checks as checks
from nano_loop.cpu import Machine
from nano_loop.environment import read_options, variable_of
from nano_loop.errors import NanoConfigError, problem, shown


def option(default: Any, check: checks.Check, help: str) -> Any:
    """Declare an option, whose name and type are those of the field.

    Parameters
    ----------
    default : object
        The default value.
    check : callable
        A check from `nano_loop.option_checks`, which defines the allowed values, including ``"auto"``.
    help : str
        A description for docstrings and the README.
    """
    return field(default=default, metadata={"check": check, "help": help})


@dataclass(frozen=True)
class Options:
    """The options of a run, validated and normalized.

    Each option declared here is an argument of `nano_loop.TorchNano` and `nano_loop.nano`, an entry of their
    docstrings, an environment variable, and an entry of the report.

    Attributes
    ----------
    auto_precision : bool
        Whether ``precision`` was ``"auto"`` before `resolved`.
    given : dict
        Each option as the user wrote it.
    from_environment : tuple of str
        The environment variables that overrode arguments, with their values.

    Raises
    ------
    NanoConfigError
        If options are invalid. The message lists each, with its value, the allowed values, and what to do.
    """

    # BigDL-Nano's eight, in its order and with its defaults.
    num_processes: int | None = option(
        None,
        checks.num_processes,
        "Number of data-parallel processes. `None`: one, or as many as `torchrun`, `srun` or `mpirun` has started.",
    )
    use_ipex: bool = option(
        False,
        checks.boolean,
        'Kernels of Intel Extension for PyTorch. Needs torch 2.8 and `pip install "nano-loop[ipex]"`. From 0.9 to 1.2 '
        "times as fast as without; the report says which, once a process has run both.",
    )
    distributed_backend: str = option(
        "subprocess",
        checks.distributed_backend,
        'Starter of the processes. `"spawn"` is another name for `"subprocess"`.',
    )
    process_group_backend: str | None = option(
        None, checks.process_group_backend, "Backend of torch.distributed between processes. `None`: gloo."
    )
    precision: int | str = option(
        32,
        checks.precision,
        'Precision of the models. `"bf16"`: bf16 autocast around each call into a model, with outputs in fp32. '
        '`"auto"`: that where the CPU has bf16 instructions, else fp32.',
    )
    cpu_for_each_process: Sequence[Sequence[int]] | None = option(
        None, checks.cpu_for_each_process, "CPU ids of each process, such as `[[0, 1], [2, 3]]`. `None`: even shares."
    )
    channels_last: bool = option(
        False, checks.boolean, "NHWC layout for 4-D and 5-D inputs of models and of convolutions."
    )
    auto_lr: bool = option(
        True, checks.boolean, "Learning rate that ramps from 1× to N× over the first 1,000 steps, with N processes."
    )
    _: KW_ONLY
    fused_optimizer: bool | Literal["auto"] = option(
        "auto",
        checks.auto_or_boolean,
        "Fused kernels of Adam, AdamW, SGD and Adagrad, guarded against a silent fault of theirs.",
    )
    allocator: bool | Literal["auto"] = option(
        "auto", checks.auto_or_boolean, "Freed memory that glibc keeps for the process."
    )
    fast_dropout: bool | Literal["auto"] = option(
        "auto",
        checks.auto_or_boolean,
        "The masks of torch's own generator, drawn about ten times as fast. Needs a C compiler, at first use.",
    )
    fast_attention: bool | Literal["auto"] = option(
        "auto",
        checks.auto_or_boolean,
        "Attention by plain bf16 matrix products, in reduced precision: about twice as fast as torch's kernel with the "
        "allocator step.",
    )
    fast_convolution: bool | Literal["auto"] = option(
        "auto",
        checks.auto_or_boolean,
        "Gradients of convolutions' weights by plain bf16 matrix products where oneDNN is slow, in reduced precision. "
        "Needs torch 2.9 or later.",
    )
    fast_fetch: bool | Literal["auto"] = option(
        "auto", checks.auto_or_boolean, "Whole batches out of an in-memory `TensorDataset`."
    )
    compile: bool | dict[str, Any] = option(  # noqa: RUF009
        False,
        checks.compile_arguments,
        "`torch.compile` of the models; a dict is passed on to it. Takes a minute first, and seldom pays on a CPU.",
    )
    bf16_ops: Collection[str] = option(
        (), checks.operators, "Names of ATen operators that autocast runs in bf16. Not in this version."
    )
    fp32_ops: Collection[str] = option(
        (), checks.operators, "Names of ATen operators that autocast runs in fp32. Not in this version."
    )
    gradient_compression: str | None = option(
        None, checks.gradient_compression, 'What gradients are rounded to on their way between processes: `"bf16"`.'
    )
    timeout: float = option(600.0, checks.seconds, "Seconds that a process waits for another.")
    verbose: bool | Literal["all"] = option(
        True, checks.verbosity, 'Report on standard error. `"all"`: also what every process prints.'
    )

    # Set by the methods below.
    auto_precision: bool = field(default=False, init=False, repr=False)
    given: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    from_environment: tuple[str, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        """Validate the arguments one by one, then together, and normalize them."""
        values = self.as_dict()
        given = {name: shown(name, value) for name, value in values.items()}
        checked, problems = _checked(values, given)
        _raise_all(problems)
        self._remember(**checked, given=given)

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Options:
        """Create the options of a call. The environment overrides the arguments.

        Parameters
        ----------
        arguments : mapping
            The arguments by name, including names that are not options.
        environ : mapping
            The environment, with options as ``NANO_LOOP_<OPTION>``.
        """
        overriding, unknown = read_options(environ, CHECKS)
        values = {name: arguments.get(name, default) for name, default in DEFAULTS.items()}
        given = {name: shown(name, value) for name, value in values.items()}
        given |= {name: variable for name, (variable, _) in overriding.items()}
        problems = [_unknown(name, shown(name, arguments[name]), OPTIONS) for name in arguments if name not in CHECKS]
        problems += [_unknown(name, text, [variable_of(each) for each in OPTIONS]) for name, text in unknown.items()]
        checked, more = _checked(values | {name: value for name, (_, value) in overriding.items()}, given)
        _raise_all(problems + more)
        options = cls(**checked)
        options._remember(given=given, from_environment=tuple(given[name] for name in overriding))
        return options

    def resolved(self, machine: Machine) -> Options:
        """Return the options with ``precision="auto"`` replaced by the precision for `machine`."""
        if self.precision != "auto":
            return self
        options = copy.copy(self)
        options._remember(precision="bf16-mixed" if machine.has_fast_bf16 else "32-true", auto_precision=True)
        return options

    @property
    def reduced_precision(self) -> bool:
        """Whether models compute in a lower precision than fp32. Call `resolved` first."""
        return self.precision in ("bf16-mixed", "bf16-true", "16-mixed")

    def as_dict(self) -> dict[str, Any]:
        """Return every option by its name."""
        return {name: getattr(self, name) for name in OPTIONS}

    def _remember(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


_DECLARED = {each.name: each for each in fields(Options) if each.init}
OPTIONS = tuple(_DECLARED)
DEFAULTS: dict[str, Any] = {name: each.default for name, each in _DECLARED.items()}
CHECKS: dict[str, checks.Check] = {name: each.metadata["check"] for name, each in _DECLARED.items()}


def _checked(values: Mapping[str, Any], given: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the normalized values, and a message for each invalid one."""
    good, problems = {}, []
    for name, value in values.items():
        try:
            good[name] = CHECKS[name](value)
        except checks.RefusedValueError as refused:
            problems.append(problem(given[name], *refused.args))
        except Exception as error:  # reading a user's object may raise any exception
            raised = f"reading its value raised {type(error).__name__}"
            problems.append(problem(given[name], raised, "Pass a plain Python value"))
    return good, problems + checks.contradictions(good)


def _unknown(name: str, given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return problem(given, "there is no such option", f"Write {close[0]}")
    return problem(given, f"there is no such option, only {', '.join(known)}", "Leave it out")


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise NanoConfigError("\n".join(problems))
