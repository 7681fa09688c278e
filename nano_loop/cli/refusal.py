"""How a command refuses bad input: one line on standard error, and one exit code."""

from __future__ import annotations

import sys

#: The exit code of bad input.
BAD_INPUT = 2


def refused(message: str) -> int:
    """Print a message on standard error, and return the exit code of bad input."""
    print(f"nano-loop: {message}", file=sys.stderr)
    return BAD_INPUT
