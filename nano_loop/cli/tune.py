"""`nano-loop tune`: measures in a script which options of nano_loop are the fastest, without training."""

from __future__ import annotations

import os

import click

from nano_loop.cli.output import print_json
from nano_loop.cli.script import begins_at_start, result_of
from nano_loop.cli.script_options import Script, ScriptCommand, takes_script
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.search.chart import check_picture

_EXAMPLES = """\b
Examples:
  nano-loop tune train.py
  nano-loop tune --num-processes 1 --plot tune.png train.py --epochs 3
"""


@click.command(cls=ScriptCommand, context_settings={"allow_interspersed_args": False}, epilog=_EXAMPLES)
@click.option("--seconds", type=click.FloatRange(1), default=90, show_default=True, help="How long it may take, about.")
@click.option("--again", is_flag=True, help="Search also if the result of an earlier search is kept.")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True), help="Draw the times into a picture.")
@takes_script()
def tune(script: Script, as_json: bool, seconds: float, again: bool, plot: str | None) -> None:
    """Measure which options are the fastest for a script.

    It trains nothing. The script runs until it first calls a function under @nano, or TorchNano.train. Copies of that
    call take steps under each candidate, in processes that are thrown away. A script that does not import nano_loop
    runs from its start under each candidate, for some steps. Options that you write here stay as they are. Ctrl-C shows
    what has been measured so far.
    """
    if plot is not None:
        _check(plot)
    content, code = result_of("tune", {"seconds": seconds, "again": again}, script, to_stderr=as_json)
    # Here, since it imports torch.
    from nano_loop.search.requested import INTERRUPTED
    from nano_loop.search.result import Tuning
    from nano_loop.search.script_search import search_script
    from nano_loop.search.search import SearchInterrupted

    if content:
        tuning = Tuning.of_dict(content)
    else:  # it trains without nano_loop
        os.environ.update(script.variables)
        try:
            tuning = search_script(script.command, {**os.environ, **begins_at_start("tune")}, seconds)
        except SearchInterrupted as interrupted:
            tuning, code = interrupted.tuning, INTERRUPTED
    if as_json:
        print_json("tune", **tuning.as_dict())
    else:
        click.echo(str(tuning))
    if plot is not None:
        tuning.plot(plot)
    if code:
        raise click.exceptions.Exit(code)


def _check(plot: str) -> None:
    """Refuse a picture that cannot be drawn, before it takes minutes to find out."""
    try:
        check_picture(plot)
    except ImportError as error:
        got, hint = f"--plot {plot}", 'Run: pip install "nano-loop[plot]"'
        raise NanoConfigError(error_message(got, "a picture needs matplotlib", hint)) from error
