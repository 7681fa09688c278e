"""The script that a command starts: it is waited for, and what nano_loop has measured in it is returned."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

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
    sys.stdout.flush()
    environ = {**os.environ, **script.variables}
    stdout = sys.stderr if to_stderr else None
    with started(command, own, script.command, environ, stdout=stdout) as (process, read_answer):
        with _signals_passed_to(process):
            code = process.wait()
        answer = read_answer()
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
