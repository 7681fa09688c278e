"""The options of a run: read from a call and from the environment, and checked.

`nano_loop.config.declarations` declares the options.
"""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano_loop.config.declarations import CHECKS, DEFAULTS, EXACT, MEASURING, NEEDS, OPTIONS, Declarations
from nano_loop.config.environment import kernels_choice, option_of, read_options, variable_of
from nano_loop.config.leftovers import LEFTOVERS, NAMES_ELSEWHERE, REMOVED, REMOVED_OTHERS
from nano_loop.config.option_checks import RefusedValueError, contradictions
from nano_loop.config.precisions import PRECISIONS, PrecisionKind
from nano_loop.errors import NanoConfigError, error_message, shown

#: The minimum similarity, from 0 to 1, of a misspelled name to an option. Less is another word, such as "workers".
_CLOSE = 0.75


@dataclass(frozen=True)
class Options(Declarations):
    """The options of a run, validated and normalized.

    `as_written` has each option as the user wrote it. `from_environment` has the environment variables that overrode
    arguments, with their values. `learnt` has the options that `nano-loop tune` has found, as text.

    Raises a `NanoConfigError` if options are invalid. The message lists each one with its value, the allowed values,
    and what to do.
    """

    as_written: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    from_environment: tuple[str, ...] = field(default=(), init=False, repr=False)
    learnt: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate the arguments one by one, then together, and normalize them."""
        values = self.as_dict()
        as_written = {name: shown(name, value) for name, value in values.items()}
        self._remember(**_checked(values, as_written), as_written=as_written)

    @classmethod
    def from_call(
        cls,
        arguments: Mapping[str, Any],
        environ: Mapping[str, str] = os.environ,
        named: Callable[[str], str] = variable_of,
    ) -> Options:
        """Create the options of a call, which the environment overrides; `named` returns its names in messages."""
        overriding, unknown = read_options(environ, CHECKS, named)
        values = {name: arguments.get(name, default) for name, default in DEFAULTS.items()}
        as_written = {name: shown(name, value) for name, value in values.items()}
        as_written |= {name: variable for name, (variable, _) in overriding.items()}
        problems = [_unknown(name, shown(name, arguments[name]), OPTIONS) for name in arguments if name not in CHECKS]
        problems += [
            _unknown(name, text, [variable_of(option) for option in OPTIONS]) for name, text in unknown.items()
        ]
        try:
            kernels_choice(environ)
        except NanoConfigError as error:
            problems.append(str(error))
        values |= {name: value for name, (_, value) in overriding.items()}
        options = cls(**_checked(values, as_written, problems))
        options._remember(as_written=as_written, from_environment=tuple(as_written[name] for name in overriding))
        return options

    def changed(self, values: Mapping[str, Any]) -> Options:
        """Return the options with some values changed; raise a `NanoConfigError` if these are not allowed."""
        options = Options(**self.as_dict() | dict(values))
        return options._with(from_environment=self.from_environment, learnt=self.learnt)

    def learnt_to(self, values: Mapping[str, Any]) -> Options:
        """Return the options with some values changed to those that `nano-loop tune` has found; see `changed`."""
        texts = {name: shown(name, value) for name, value in values.items()}
        return self.changed(values)._with(learnt=texts, as_written=self.as_written | texts)

    def is_asked_for(self, name: str) -> bool:
        """Whether the user requested a step with True. Then it is an error if the step has nothing to do."""
        return getattr(self, name, None) is True and name not in self.learnt

    @property
    def set_by_environment(self) -> set[str]:
        """The options that are set by the environment."""
        return {option_of(text.partition("=")[0]) for text in self.from_environment}

    def refuse_idle(self, cpus: int, is_launched: bool) -> None:
        """Raise a `NanoConfigError` if the program sets an option that cannot have an effect.

        Options from the environment may not be the program's, nor an external launcher's number of processes
        (`is_launched`).
        """
        values = self.as_dict() | {"cpus": cpus}
        of_others = self.set_by_environment | ({"num_processes"} if is_launched else set())
        problems = []
        for name, need in NEEDS.items():
            is_default = values[name] == CHECKS[name](DEFAULTS[name])
            if not (is_default or need.is_met(values) or {name, need.of} & of_others):
                got = " with ".join(self.as_written[option] for option in dict.fromkeys((name, need.of)))
                problems.append(error_message(got, need.expected, need.hint))
        if problems:
            raise NanoConfigError("\n".join(problems))

    def for_nested_run(self, **changes: Any) -> Options:
        """Return the options of a nested run with its own copy of a model, with some changed."""
        alone = {"num_processes": 1, "cpu_for_each_process": None, "verbose": False}
        return self._with(**alone, **changes, **dict.fromkeys(MEASURING, False))

    def without_cpus(self) -> Options:
        """Return the options without ``cpu_for_each_process``."""
        return self._with(cpu_for_each_process=None)

    @property
    def processes(self) -> int:
        """The number of processes of a run, including this one. An ``"auto"`` that was not measured is one."""
        return self.num_processes if isinstance(self.num_processes, int) else 1

    @property
    def reduced_precision(self) -> bool:
        """Whether tensors inside models are bf16."""
        return "bfloat16" in (self.kind.autocast_name, self.kind.parameters_name)

    @property
    def kind(self) -> PrecisionKind:
        """The entry of the precision in the table of precisions."""
        return PRECISIONS[str(self.precision)]

    @property
    def listed_operators(self) -> dict[str, tuple[str, ...]]:
        """The names in ``bf16_ops`` and ``fp32_ops``, by dtype. Files are already read."""
        return {"bf16": tuple(self.bf16_ops), "fp32": tuple(self.fp32_ops)}  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, Any]:
        """Return every option by name."""
        return {name: getattr(self, name) for name in OPTIONS}

    def _with(self, **values: Any) -> Options:
        """Return a copy with values that are already checked."""
        options = copy.copy(self)
        options._remember(**values)
        return options

    def _remember(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _checked(values: Mapping[str, Any], as_written: Mapping[str, str], problems: Iterable[str] = ()) -> dict[str, Any]:
    """Return the normalized values, or raise an error with these problems and one for each invalid value."""
    good, problems = {}, [*problems]
    for name, value in values.items():
        try:
            good[name] = CHECKS[name](value)
        except RefusedValueError as refused:
            problems.append(error_message(as_written[name], *refused.args))
        except Exception as error:  # reading a user's object may raise any exception
            raised = f"reading its value raised {type(error).__name__}"
            problems.append(error_message(as_written[name], raised, "Pass a plain Python value"))
    problems += contradictions(good, {name: text.partition("=")[0] for name, text in as_written.items()})
    if good.get("exact"):
        problems += _inexact(good, as_written)
        good |= EXACT
    if problems:
        raise NanoConfigError("\n".join(problems))
    return good


def _inexact(values: Mapping[str, Any], as_written: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each valid value that changes bits. With ``exact``, ``"auto"`` becomes an exact value."""
    for name, exact in EXACT.items():
        if values.get(name, exact) not in (exact, "auto"):
            got = f"{as_written[name]} with {as_written['exact']}"
            yield error_message(got, "it changes bits of torch's results in fp32", "Remove one of the two")


def _unknown(name: str, got: str, known: Sequence[str]) -> str:
    """Return the message about an argument or a variable that is not an option, with the closest known name."""
    if (removed := REMOVED_OTHERS.get(name) or REMOVED.get(option_of(name))) is not None:
        return error_message(got, *removed)
    if name in LEFTOVERS:
        return error_message(got, LEFTOVERS[name].expected, LEFTOVERS[name].hint)
    if name in NAMES_ELSEWHERE:
        return error_message(got, "there is no such option", f"Write {NAMES_ELSEWHERE[name]}")
    begun = [option for option in known if option.startswith(name)]
    close = begun if len(begun) == 1 else difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
    hint = f"Write {close[0]}" if close else "Omit it: help(nano_loop.nano) lists the options"
    return error_message(got, "there is no such option", hint)
