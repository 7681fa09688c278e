"""`nano-loop tune`: measures which options of nano_loop are the fastest for a script."""

from __future__ import annotations

import os
import sys

import click

from nano_loop.cli.output import as_text
from nano_loop.cli.script_options import Script, ScriptCommand, takes_script
from nano_loop.cli.tuning.result import check_picture, draw
from nano_loop.cli.tuning.script_trial import TrialFailedError

_INTERRUPTED = 130  # the exit code of a command that Ctrl-C has ended, as shells have it
_EXAMPLES = """\b
Examples:
  nano-loop tune train.py
  nano-loop tune --num-processes 1 --plot tune.png train.py --epochs 3
"""


@click.command(cls=ScriptCommand, context_settings={"allow_interspersed_args": False}, epilog=_EXAMPLES)
@click.option("--seconds", type=click.FloatRange(1), default=120, show_default=True, help="Approximate time limit.")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True), help="Draw the times into a picture.")
@takes_script()
def tune(script: Script, as_json: bool, seconds: float, plot: str | None) -> None:
    """Measure which options are the fastest for a script.

    The script runs from its start under each candidate, twice, until it has taken some steps. It need not use
    nano_loop. What it writes until then is written; what it prints is not shown. Options that you write here stay as
    they are. Ctrl-C shows what has been measured so far.
    """
    if plot is not None:
        check_picture(plot)
    from nano_loop.cli.tuning.search import Search  # here, since it imports torch

    os.environ.update(script.variables)
    search = Search(script.name, script.command, os.environ, seconds)
    try:
        tuning = search.run()
    except TrialFailedError as error:  # it ends as under python
        print(error.errors, file=sys.stderr)
        code = error.code or 0
        raise click.exceptions.Exit(code if code > 0 else 128 - code) from error
    if as_json:
        click.echo(as_text("tune", **tuning.as_dict()))
    else:
        click.echo(str(tuning))
    if plot is not None:
        draw(tuning, plot)
    if search.is_interrupted:
        raise click.exceptions.Exit(_INTERRUPTED)
