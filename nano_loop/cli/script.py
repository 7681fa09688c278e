"""The script that a command starts: it is waited for, and what nano_loop has measured in it is returned."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from types import FrameType
from typing import IO, Any

import click

from nano_loop.cli.at_start import search_path
from nano_loop.cli.script_options import Script
from nano_loop.config.protocol import COMMAND, INSTALL, Command
from nano_loop.cpu.parent_process import end_with
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.profiling import STEPS


def result_of(command: str, own: Mapping[str, Any], script: Script, *, to_stderr: bool) -> dict[str, Any]:
    """Run a script until nano_loop has done in it what a command asks for, and return the result.

    Parameters
    ----------
    own : mapping
        The command's own arguments.
    to_stderr : bool
        Whether what the script prints goes to standard error.

    Raises
    ------
    NanoConfigError
        If it ends before anything is measured, or if nano_loop refuses what it does.
    click.exceptions.Exit
        If the script fails, with its exit code.
    """
    with result_file() as file:
        variables = {COMMAND: Command(command, path_of(file), dict(own)).encoded()}
        variables |= begins_at_start(command)
        sys.stdout.flush()
        process = subprocess.Popen(
            script.command,
            env={**os.environ, **script.variables, **variables},
            stdout=sys.stderr if to_stderr else None,
            preexec_fn=partial(end_with, os.getpid()) if os.name == "posix" else None,  # no thread runs here
        )
        with _signals_passed_to(process):
            code = process.wait()
        answer = answer_in(file)
    if answer is not None and "error" in answer:
        raise NanoConfigError(answer["error"])
    if code:
        raise click.exceptions.Exit(code if code > 0 else 128 - code)
    if answer is None:
        expected = "profile measures those of the first optimizer of torch in its thread"
        got = f"{script.name} takes fewer than {STEPS} steps"
        raise NanoConfigError(error_message(got, expected, "Let it train longer"))
    result: dict[str, Any] = answer["result"]
    return result


def begins_at_start(command: str) -> dict[str, str]:
    """Return the variables by which each Python does what a command asks for, from what it trains first on."""
    return {INSTALL: command, "PYTHONPATH": search_path(os.environ)}


def result_file() -> IO[bytes]:
    """Open a file for the result. Where /proc is, it has no name, so a command that is killed leaves none."""
    return tempfile.TemporaryFile() if os.path.exists("/proc/self/fd") else tempfile.NamedTemporaryFile()


def path_of(file: IO[bytes]) -> str:
    """Return the path by which the script, or a process that it starts, opens the file."""
    return str(file.name) if isinstance(file.name, str) else f"/proc/{os.getpid()}/fd/{file.fileno()}"


def answer_in(file: IO[bytes]) -> dict[str, Any] | None:
    """Return what the script has answered; None if it has left nothing, or not all of it."""
    file.seek(0)
    try:
        answer: dict[str, Any] = json.load(file)
    except ValueError:
        return None
    return answer


@contextlib.contextmanager
def _signals_passed_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Let the script end by SIGTERM and by Ctrl-C, which a terminal sends to both processes."""

    def passed(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, passed),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN if os.isatty(0) else passed),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
