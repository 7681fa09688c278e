"""The exports of `nano-loop env` in this shell, and the previous values, encoded in one variable."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import NamedTuple

from nano_loop.errors import NanoConfigError, error_message

#: The variable. It is not an option.
EXPORTS = "NANO_LOOP_ENV_BEFORE"


class Exports(NamedTuple):
    """The variables that were exported."""

    before: dict[str, str | None]  # the previous value of each; None if it was not set
    after: dict[str, str]  # the exported value of each

    def encoded(self) -> str:
        """Return both as letters and digits, which shells do not change."""
        return base64.urlsafe_b64encode(json.dumps(self._asdict()).encode()).decode()


def read_exports(environ: Mapping[str, str]) -> Exports:
    """Return the exports of this environment, which may be empty.

    Raises
    ------
    NanoConfigError
        If the variable is not in the format of `nano-loop env`.
    """
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
