"""The exports of `nano-loop env` in this shell, and what was there before: one variable holds both."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import NamedTuple

from nano_loop.errors import NanoConfigError, error_message

#: The variable. It is no option.
EXPORTS = "NANO_LOOP_ENV_BEFORE"


class Exports(NamedTuple):
    """The variables that were exported."""

    before: dict[str, str | None]  # the value of each before; None where it was not set
    after: dict[str, str]  # the value of each that was exported

    def encoded(self) -> str:
        """Return both as letters and digits, which no shell changes."""
        return base64.urlsafe_b64encode(json.dumps(self._asdict()).encode()).decode()


def read_exports(environ: Mapping[str, str]) -> Exports:
    """Return what was exported in this environment; nothing if nothing was.

    Raises
    ------
    NanoConfigError
        If the variable does not hold what `nano-loop env` has written.
    """
    text = environ.get(EXPORTS)
    if text is None:
        return Exports({}, {})
    try:
        exports = Exports(**json.loads(base64.urlsafe_b64decode(text)))
    except (ValueError, TypeError, RecursionError):
        exports = Exports({"": ""}, {})
    if not _is_mapping(exports.before, (str, type(None))) or not _is_mapping(exports.after, str):
        expected = "it holds what `nano-loop env` has written"
        raise NanoConfigError(error_message(f"{EXPORTS} is damaged", expected, f"Unset {EXPORTS}, or open a new shell"))
    return exports


def is_exported(name: str, environ: Mapping[str, str]) -> bool:
    """Whether the value of a variable is that of `nano-loop env`, and not a value that the user has chosen."""
    try:
        after = read_exports(environ).after
    except NanoConfigError:
        return False
    return name in after and environ.get(name) == after[name]


def _is_mapping(value: object, kinds: type | tuple[type, ...]) -> bool:
    # Names that no shell has would end in its code.
    return isinstance(value, dict) and all(
        isinstance(name, str) and name.isidentifier() and name.isascii() and isinstance(item, kinds)
        for name, item in value.items()
    )
