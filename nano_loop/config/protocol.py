"""The protocol between commands and scripts: an environment variable with a command for the script that it starts.

It does not import torch, to keep the command line fast.
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

#: The variable. It is not an option.
COMMAND = "NANO_LOOP_COMMAND"
#: The variable that makes Python's startup hook install the ambient mode. It is not an option.
INSTALL = "NANO_LOOP_INSTALL"
#: The name of gradient averaging in profiles.
AVERAGING_EVENT = "nano_loop: averaging"


class Command(NamedTuple):
    """A command."""

    name: str  # "tune" or "profile"
    result: str  # the path of the file to which the script writes its result
    arguments: dict[str, Any]  # the arguments of the command

    def encoded(self) -> str:
        """Return the command as the value of the variable."""
        return json.dumps(self._asdict())

    def answer(self, **content: Any) -> None:
        """Write the result."""
        Path(self.result).write_text(json.dumps(content), encoding="utf-8")

    def end(self, **content: Any) -> NoReturn:
        """Write the result and end the process, since the rest of the script is not needed."""
        self.answer(**content)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the script may have closed or replaced them
                stream.flush()
        os._exit(0)


@cache
def take_command() -> Command | None:
    """Return the command that started this process, or None.

    The first call removes the variable, so that processes that the script starts do not execute the command.
    """
    text = os.environ.pop(COMMAND, None)
    try:
        return None if text is None else Command(**json.loads(text))
    except (ValueError, TypeError) as error:
        expected = "only nano-loop may write it, for a script that it starts"
        raise NanoConfigError(error_message(f"{COMMAND} is damaged", expected, f"Unset {COMMAND}")) from error


def is_json(value: Any) -> bool:
    """Whether JSON can represent a value, which is not so for a function."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
