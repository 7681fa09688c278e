"""What the environment says: options in ``NANO_LOOP_<OPTION>``, and how many processes somebody else has started."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from nano_loop.option_checks import Check, RefusedValueError

_PREFIX = "NANO_LOOP_"
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None}


def variable_of(option: str) -> str:
    """Return the name of the variable that holds an option."""
    return _PREFIX + option.upper()


def read_options(
    environ: Mapping[str, str], checks: Mapping[str, Check]
) -> tuple[dict[str, tuple[str, Any]], dict[str, str]]:
    """Return the options that the environment holds, and the variables that look like one and are none.

    Parameters
    ----------
    environ : mapping
        The environment.
    checks : mapping
        By an option's name: what it may be, which says how its text is to be read.

    Returns
    -------
    dict
        By an option's name: the variable with its text, such as ``NANO_LOOP_PRECISION=bf16``, and the value.
    dict
        By the name of an unknown variable: that name with its text.
    """
    variables = {variable_of(option): option for option in checks}
    found, unknown = {}, {}
    for name in sorted(each for each in environ if each.upper().startswith(_PREFIX)):
        text = f"{name}={environ[name]}"
        if name in variables:
            found[variables[name]] = (text, _read(environ[name].strip(), checks[variables[name]]))
        else:
            unknown[name] = text
    return found, unknown


def _read(text: str, check: Check) -> Any:
    """Read a value: a word such as ``on``, a Python literal, names with commas between them, or a plain string."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text in ("0", "1") and _may_be(True, check):
        return text == "1"
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        names = [name.strip() for name in text.split(",")]
        return names if _may_be(names, check) else text


def _may_be(value: Any, check: Check) -> bool:
    try:
        check(value)
    except RefusedValueError:
        return False
    return True
