"""The refusal of bad input by a command: one line on standard error for each fault, and one exit code."""

from __future__ import annotations

import sys

#: The exit code of bad input.
BAD_INPUT = 2


def refused(message: str) -> int:
    """Print each line of a message on standard error, and return the exit code of bad input."""
    for line in message.splitlines():
        print(f"nano-loop: {line}", file=sys.stderr)
    return BAD_INPUT
