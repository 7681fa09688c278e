"""The lines by which each shell sets and unsets an environment variable, whatever the value."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import NamedTuple


class Shell(NamedTuple):
    """The lines of a shell."""

    export: Callable[[str, str], str]  # takes the name and the value of a variable, and returns the line that sets it
    #: Takes the name, and returns the line that unsets it. It does nothing if the variable is not set.
    unset: Callable[[str], str]


def _posix(value: str) -> str:
    # A single quote ends the text, comes escaped, and begins the text again.
    return "'" + value.replace("'", "'\\''") + "'"


def _fish(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _powershell(value: str) -> str:
    # PowerShell takes the typographic quotes for the plain one. Doubled, each stands for one.
    return "'" + re.sub("(['\u2018\u2019\u201a\u201b])", r"\1\1", value) + "'"


_POSIX = Shell(lambda name, value: f"export {name}={_posix(value)}", lambda name: f"unset {name}")

#: By the names that `--shell` takes.
SHELLS = {
    "bash": _POSIX,
    "zsh": _POSIX,
    "fish": Shell(lambda name, value: f"set -gx {name} {_fish(value)}", lambda name: f"set -e {name}"),
    "powershell": Shell(
        lambda name, value: f"$env:{name} = {_powershell(value)}",
        lambda name: f"Remove-Item -ErrorAction SilentlyContinue Env:{name}",
    ),
}


def shell_of(environ: Mapping[str, str]) -> str:
    """Return the name of the user's shell by ``SHELL``, or ``bash`` if it is none of those in `SHELLS`."""
    name = PurePath(environ.get("SHELL", "")).name
    name = "powershell" if name == "pwsh" else name
    return name if name in SHELLS else "bash"


def lines_for(shell: str, changes: Mapping[str, str | None]) -> bytes:
    """Return the lines that make changes of the environment, in its encoding. A value of None unsets a variable."""
    of = SHELLS[shell]
    lines = [of.unset(name) if value is None else of.export(name, value) for name, value in changes.items()]
    return os.fsencode("".join(f"{line}\n" for line in lines))
