"""The script that a command starts: it is waited for, and what nano_loop has measured in it is returned."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
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


def result_of(command: str, own: Mapping[str, Any], script: Script, *, to_stderr: bool) -> tuple[dict[str, Any], int]:
    """Run a script until nano_loop has done in it what a command asks for; return the result and the exit code.

    The code is 0, or that of Ctrl-C with a result so far.

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
    with _result_file() as file:
        variables = {COMMAND: Command(command, _path_of(file), dict(own)).encoded()}
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
        result = _read(file)
    if result is not None and "error" in result:
        raise NanoConfigError(result["error"])
    if code and not (result or {}).get("interrupted"):
        raise click.exceptions.Exit(code if code > 0 else 128 - code)
    if result is None:
        raise NanoConfigError(error_message(*_UNANSWERED[command](script.name)))
    return result["result"], code


def begins_at_start(command: str) -> dict[str, str]:
    """Return the variables by which each Python does what a command asks for, from what it trains first on."""
    return {INSTALL: command, "PYTHONPATH": search_path(os.environ)}


#: What is said of a script that ends before its command has measured anything.
_UNANSWERED: Mapping[str, Callable[[str], tuple[str, str, str]]] = {
    "profile": lambda script: (
        f"{script} takes fewer than {STEPS} steps",
        "profile measures those of the first optimizer of torch in its thread",
        "Let it train longer",
    ),
    "tune": lambda script: (
        f"{script} has called no function under @nano, and no TorchNano.train",
        "tune measures the first of these calls, or the steps of a script that does not import nano_loop",
        "Decorate its training function",
    ),
}


def _result_file() -> IO[bytes]:
    """Open a file for the result. Where /proc is, it has no name, so a command that is killed leaves none."""
    return tempfile.TemporaryFile() if os.path.exists("/proc/self/fd") else tempfile.NamedTemporaryFile()


def _path_of(file: IO[bytes]) -> str:
    """Return the path by which the script, or a process that it starts, opens the file."""
    return str(file.name) if isinstance(file.name, str) else f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _read(file: IO[bytes]) -> dict[str, Any] | None:
    """Return the result; None if the script has not left one, or not all of it."""
    file.seek(0)
    try:
        result: dict[str, Any] = json.load(file)
    except ValueError:
        return None
    return result


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
