"""Start the script of `profile` and `tune`, and read the answer that nano_loop writes in it."""

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
    """Start a script in which each Python process executes a command once it begins to train.

    Yields the process, which is killed on exit, and a function that returns the answer of the script, or None.

    Parameters
    ----------
    command, own
        The command and its arguments.
    line, environ, **streams
        The command line of the script, its environment, and arguments of `subprocess.Popen`.
    """
    # With /proc, the file is anonymous, so that a killed command leaves no file behind.
    is_named = not os.path.exists("/proc/self/fd")
    with tempfile.NamedTemporaryFile() if is_named else tempfile.TemporaryFile() as file:

        def read_answer() -> dict[str, Any] | None:
            file.seek(0)
            try:
                answer: dict[str, Any] = json.load(file)
            except ValueError:  # the answer is missing or incomplete
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
    """Return the exception that ends a command with the script's exit code, as shells report it, also for signals."""
    return click.exceptions.Exit(code if code > 0 else 128 - code)
