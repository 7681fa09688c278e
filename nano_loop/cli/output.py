"""The output of commands: JSON of one shape, and colour on terminals alone."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

#: The version of the shape of what `--json` prints. It is raised when an entry is removed or changes its meaning.
SHAPE = 1


def print_json(command: str, **content: Any) -> None:
    """Print one JSON object, which says the version of its shape and the command."""
    click.echo(json.dumps({"version": SHAPE, "command": command, **content}, indent=2))


def styled(text: str, **style: Any) -> str:
    """Return a text in a colour, or as it is if standard output is no terminal or ``NO_COLOR`` is set."""
    return click.style(text, **style) if _has_colour() else text


def _has_colour() -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain
