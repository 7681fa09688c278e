"""The script that `profile` and `tune` start, and what nano_loop answers in it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import click

from nano_loop.cli.at_start import search_path
from nano_loop.config.protocol import COMMAND, INSTALL, Command
from nano_loop.cpu.parent_process import end_with


@contextlib.contextmanager
def started(
    command: str, own: Mapping[str, Any], line: Sequence[str], environ: Mapping[str, str], **streams: Any
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], dict[str, Any] | None]]]:
    """Start a script, in which each Python does what a command asks for, from what it trains first on.

    Give its process, which is killed on leaving, and a function that returns what the script has answered, or None.

    Parameters
    ----------
    command, own
        The command, and its own arguments.
    line, environ, **streams
        What runs the script, its environment, and arguments of `subprocess.Popen`.
    """
    # Where /proc is, the file has no name, so a command that is killed leaves none.
    is_named = not os.path.exists("/proc/self/fd")
    with tempfile.NamedTemporaryFile() if is_named else tempfile.TemporaryFile() as file:

        def read_answer() -> dict[str, Any] | None:
            file.seek(0)
            try:
                answer: dict[str, Any] = json.load(file)
            except ValueError:  # it has left nothing, or not all of it
                return None
            return answer

        path = file.name if is_named else f"/proc/{os.getpid()}/fd/{file.fileno()}"
        variables = {COMMAND: Command(command, path, dict(own)).encoded(), INSTALL: command}
        process = subprocess.Popen(
            line,
            env={**environ, **variables, "PYTHONPATH": search_path(environ)},
            preexec_fn=partial(end_with, os.getpid()) if os.name == "posix" else None,  # no thread runs here
            **streams,
        )
        try:
            yield process, read_answer
        finally:
            process.kill()
            process.wait()


def exit_with(code: int) -> click.exceptions.Exit:
    """Return what ends a command with the exit code of its script, which shells have for a signal, too."""
    return click.exceptions.Exit(code if code > 0 else 128 - code)
