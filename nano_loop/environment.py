"""Options that the environment holds, in ``NANO_LOOP_<OPTION>``."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from nano_loop.options import LISTS, SWITCHES

_PREFIX = "NANO_LOOP_"
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None}


def variable_of(option: str) -> str:
    """Return the name of the variable that holds an option."""
    return _PREFIX + option.upper()


def read_options(
    environ: Mapping[str, str], options: Sequence[str]
) -> tuple[dict[str, tuple[str, Any]], dict[str, str]]:
    """Return the options that the environment holds, and the variables that look like one and are none.

    Returns
    -------
    dict
        By an option's name: the variable with its text, such as ``NANO_LOOP_PRECISION=bf16``, and the value.
    dict
        By the name of an unknown variable: that name with its text.
    """
    variables = {variable_of(option): option for option in options}
    found, unknown = {}, {}
    for name in sorted(each for each in environ if each.upper().startswith(_PREFIX)):
        text = f"{name}={environ[name]}"
        if name in variables:
            found[variables[name]] = (text, _read(variables[name], environ[name].strip()))
        else:
            unknown[name] = text
    return found, unknown


def _read(option: str, text: str) -> Any:
    """Read a value: a word such as ``on``, a Python literal, names with commas between them, or a plain string."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if option in SWITCHES and text in ("0", "1"):
        return text == "1"
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return [name.strip() for name in text.split(",")] if option in LISTS else text
