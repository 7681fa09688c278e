"""`nano-loop profile`: show where a script spends the time of a training step."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType

import click

from nano_loop.cli import as_text
from nano_loop.cli.script import Script, ScriptCommand, exit_with, started, takes_script
from nano_loop.config.declarations import CHECKS
from nano_loop.config.environment import read_options
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.profiling import STEPS
from nano_loop.profiling.kinds import lines_of, lines_of_memory

_EXAMPLES = """\b
Examples:
  nano-loop profile train.py
  nano-loop profile --precision bf16 --trace trace.json train.py --epochs 3
"""


@click.command(cls=ScriptCommand, epilog=_EXAMPLES)
@click.option("--trace", type=click.Path(dir_okay=False, writable=True), help="Write a trace for Perfetto.")
@takes_script()
def profile(script: Script, as_json: bool, trace: str | None) -> None:
    """Show how a training step spends its time and memory.

    The script runs until some steps of its first optimizer have been timed and profiled, and then ends. Options
    override those in the code.
    """
    if trace is not None and not os.path.isdir(os.path.dirname(os.path.abspath(trace))):
        raise NanoConfigError(
            error_message(f"--trace {trace}", "its folder does not exist", "Name a file in a folder that exists")
        )
    environ = {**os.environ, **script.variables}
    # Options from the command line or the environment apply to the script. Without any, it is profiled unchanged.
    own = {"trace": trace and os.path.abspath(trace), "installs": any(read_options(environ, CHECKS))}
    sys.stdout.flush()
    stdout = sys.stderr if as_json else None
    with started("profile", own, script.command, environ, stdout=stdout) as (process, read_answer):
        with _signals_passed_to(process):
            code = process.wait()
        answer = read_answer() or {}
    if "error" in answer:
        raise NanoConfigError(answer["error"])
    if code:
        raise exit_with(code)
    if not answer:
        expected = "profile measures the steps of the first torch optimizer in its thread"
        got = f"{script.name} takes fewer than {STEPS} steps"
        raise NanoConfigError(error_message(got, expected, "Name a script that trains, or let it train longer"))
    if script.variables and not answer["is_in_run"]:
        got = f"{script.name} did not start a run of nano_loop"
        expected = "options act on functions under @nano, TorchNano, accelerated and Lightning's Trainer"
        raise NanoConfigError(error_message(got, expected, "Decorate its training function"))
    content = answer["result"]
    if as_json:
        click.echo(as_text("profile", **content))
    else:
        click.echo("\n".join([*lines_of(content), "", *lines_of_memory(content["memory"])]))


@contextlib.contextmanager
def _signals_passed_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward SIGTERM to the script, and let Ctrl-C, which a terminal sends to both processes, end it."""

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
