"""`nano-loop tune`: measure which options of nano_loop are the fastest for a script."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from nano_loop.cli import as_text
from nano_loop.cli.script import Script, ScriptCommand, exit_with, takes_script
from nano_loop.cli.tuning.result import check_picture, draw
from nano_loop.cli.tuning.search import Search
from nano_loop.cli.tuning.trial import TrialFailedError
from nano_loop.errors import NanoConfigError, error_message

_EXAMPLES = """\b
Examples:
  nano-loop tune train.py
  nano-loop tune --num-processes 1 --plot tune.png train.py --epochs 3
"""


class _Seconds(click.IntRange):
    """A number of seconds, which errors and the help call an integer."""

    name = "integer"


@click.command(cls=ScriptCommand, epilog=_EXAMPLES)
@click.option("--seconds", type=_Seconds(1, 1_000_000), default=120, show_default=True, help="Approximate time limit.")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True), help="Save a chart of the times.")
@takes_script()
def tune(script: Script, as_json: bool, seconds: int, plot: str | None) -> None:
    """Measure which options are the fastest for a script.

    The script runs twice from its start with each candidate, until it has taken some steps. It need not use
    nano_loop. It writes its files as usual, but its output is not shown. Options that you write here stay unchanged.
    Ctrl-C shows the table so far. The fastest options in each precision are saved, and later runs of the unchanged
    script use them.
    """
    if script.name == "-" or Path(script.name).is_fifo():
        expected = "the script is started several times, and standard input can be read only once"
        raise NanoConfigError(error_message(f"tune {script.name}", expected, "Write it to a file"))
    if plot is not None:
        check_picture(plot)
    search = Search(script, seconds)
    try:
        tuning = search.run()
    except TrialFailedError as error:  # exit as the script does under python
        print(error.errors, file=sys.stderr)
        raise exit_with(error.code or 0) from error
    click.echo(as_text("tune", **asdict(tuning)) if as_json else str(tuning))
    if plot is not None:
        draw(tuning, plot)
    if search.is_interrupted:
        raise click.Abort
