"""What `nano-loop run` leaves for the script that it becomes, so that a line at the end can say that no run has begun.

It does not import torch, so that the command line need not wait for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

#: The variable. It is no option. It stays in the environment for the processes that the script starts.
RUN = "NANO_LOOP_RUN"

#: Whether a run has begun in this process. What reads it at the end imports nothing: see `nano_loop.cli.at_start`.
begun = False

_HOOK = Path(__file__).parent / "cli/at_start"
_PATH = "PYTHONPATH"


def environment_with_note(environ: Mapping[str, str], line: str) -> dict[str, str]:
    """Return the environment for the Python that this process becomes.

    Parameters
    ----------
    environ : mapping
        The environment of the script.
    line : str
        What is printed to standard error if the script ends and has begun no run.
    """
    mark = os.path.join(tempfile.gettempdir(), f"nano_loop-begun-{secrets.token_hex(8)}")
    path = environ.get(_PATH)
    # Lines, which the start of Python reads without a module such as json, that the script may never import.
    note = [str(os.getpid()), mark, " ".join(line.split()), *([] if path is None else [path])]
    return {**environ, RUN: "\n".join(note), _PATH: os.pathsep.join([str(_HOOK), *([path] if path else [])])}


def note_run() -> None:
    """Note that a run begins, for `nano-loop run`, if the script or a parent of this process is its."""
    global begun
    begun = True
    text = os.environ.get(RUN)
    if text is None:
        return
    process, mark, *_ = [*text.split("\n"), ""]
    if process != str(os.getpid()):  # such as a rank that torchrun has started: the script looks for the file
        with contextlib.suppress(OSError):  # it is there, or the disk is full
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
