"""The options in the environment variables ``NANO_LOOP_<OPTION>``, and the exports of `nano-loop env`."""

from __future__ import annotations

import ast
import base64
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nano_loop.config.option_checks import Check, RefusedValueError
from nano_loop.config.protocol import COMMAND, INSTALL
from nano_loop.errors import NanoConfigError, error_message, quoted

#: The variable with the exports of `nano-loop env`. It is not an option.
EXPORTS = "NANO_LOOP_ENV_BEFORE"


class Exports(NamedTuple):
    """The variables that were exported."""

    before: dict[str, str | None]  # the previous value of each; None if it was not set
    after: dict[str, str]  # the exported value of each

    def encoded(self) -> str:
        """Return both as letters and digits, which shells do not change."""
        return base64.urlsafe_b64encode(json.dumps(self._asdict()).encode()).decode()


def read_exports(environ: Mapping[str, str]) -> Exports:
    """Return the exports of this environment, which may be empty; raise a `NanoConfigError` if they are damaged."""
    text = environ.get(EXPORTS)
    if text is None:
        return Exports({}, {})
    try:
        exports = Exports(**json.loads(base64.urlsafe_b64decode(text)))
    except (ValueError, TypeError, RecursionError):
        exports = Exports({"": ""}, {})
    if not _is_mapping(exports.before, (str, type(None))) or not _is_mapping(exports.after, str):
        expected = "only `nano-loop env` may write it"
        raise NanoConfigError(error_message(f"{EXPORTS} is damaged", expected, f"Unset {EXPORTS}, or open a new shell"))
    return exports


def is_exported(name: str, environ: Mapping[str, str]) -> bool:
    """Whether the value of a variable is from `nano-loop env`, and not from the user."""
    try:
        after = read_exports(environ).after
    except NanoConfigError:
        return False
    return name in after and environ.get(name) == after[name]


def _is_mapping(value: object, kinds: type | tuple[type, ...]) -> bool:
    # Invalid names would be executed as code by the shell.
    return isinstance(value, dict) and all(
        isinstance(name, str) and name.isidentifier() and name.isascii() and isinstance(item, kinds)
        for name, item in value.items()
    )


#: Selects the kernels in C. It is not an option, since libraries are loaded once for all runs of a process.
KERNELS = "NANO_LOOP_KERNELS"

_KERNELS = ("v3", "v4", "bf16", "neon", "sve", "compile", "off")
_PREFIX = "NANO_LOOP_"
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None}


def variable_of(option: str) -> str:
    """Return the name of the environment variable of an option."""
    return _PREFIX + option.upper()


def option_of(variable: str) -> str:
    """Return the name of the option that an environment variable sets, in any case."""
    return variable.lower().removeprefix(_PREFIX.lower())


def kernels_choice(environ: Mapping[str, str]) -> str | None:
    """Return the value of `KERNELS`, or None; raise a `NanoConfigError` if it is not allowed."""
    text = environ.get(KERNELS, "")
    choice = text.strip().lower()
    if choice and choice not in _KERNELS:
        expected = f"it is one of {', '.join(_KERNELS)}"
        hint = f"Correct it, or unset {KERNELS} for the best kernels that this CPU has"
        raise NanoConfigError(error_message(f"{KERNELS}={quoted(text)}", expected, hint))
    return choice or None


def read_options(
    environ: Mapping[str, str], checks: Mapping[str, Check], named: Callable[[str], str] = variable_of
) -> tuple[dict[str, tuple[str, Any]], dict[str, str]]:
    """Return the options in the environment, as the user's text and the value, and the text of unknown variables.

    `named` returns the user's name of an option: its variable or its flag.
    """
    variables = {variable_of(option): option for option in checks}
    known, unknown = {}, {}
    ours = (name for name in environ if name.upper().startswith(_PREFIX))
    for name in sorted(name for name in ours if name not in (KERNELS, EXPORTS, COMMAND, INSTALL)):
        # Messages never show the secret of an older version.
        value = "..." if "SECRET" in name.upper() else quoted(environ[name])
        if name in variables:
            option = variables[name]
            known[option] = (f"{named(option)}={value}", _read(environ[name].strip(), checks[option]))
        else:
            unknown[name] = f"{quoted(name)}={value}"
    return known, unknown


def _read(text: str, check: Check) -> Any:
    """Parse a value: a word such as ``on``, a Python literal, comma-separated names, or a plain string."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text in ("0", "1") and may_be(True, check):
        return text == "1"
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        names = [name.strip() for name in text.split(",")]
        return names if may_be(names, check) else text


def may_be(value: Any, check: Check) -> bool:
    """Whether a check accepts a value."""
    try:
        check(value)
    except RefusedValueError:
        return False
    return True
