"""The protocol of commands and scripts: a variable of the environment says what nano-loop asks of a script it starts.

It does not import torch, so that the command line need not wait for it.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from nano_loop.errors import NanoConfigError, error_message

#: The variable. It is no option.
COMMAND = "NANO_LOOP_COMMAND"
#: The variable by which the hook at the start of Python installs the ambient mode. It is no option.
INSTALL = "NANO_LOOP_INSTALL"
#: What a profile shows around an averaging of gradients.
AVERAGING_EVENT = "nano_loop: averaging"


class Command(NamedTuple):
    """A command."""

    name: str  # "tune" or "profile"
    result: str  # the path of the file that the script writes the result to
    arguments: dict[str, Any]  # the command's own

    def encoded(self) -> str:
        """Return it as the value of the variable."""
        return json.dumps(self._asdict())

    def answer(self, **content: Any) -> None:
        """Write the result."""
        Path(self.result).write_text(json.dumps(content), encoding="utf-8")

    def end(self, **content: Any) -> NoReturn:
        """Write the result, and end the process: what follows in the script belongs to a training."""
        self.answer(**content)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the script may have closed or replaced it
                stream.flush()
        os._exit(0)


@cache
def take_command() -> Command | None:
    """Return the command of this process; None if nano-loop has not started it.

    The variable is removed at the first call, so that processes which the script starts are not commanded.
    """
    text = os.environ.pop(COMMAND, None)
    try:
        return None if text is None else Command(**json.loads(text))
    except (ValueError, TypeError) as error:
        expected = "it holds what nano-loop tells a script that it starts"
        raise NanoConfigError(error_message(f"{COMMAND} is damaged", expected, f"Unset {COMMAND}")) from error


def is_json(value: Any) -> bool:
    """Whether JSON has a value, which a function is not."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
