"""`nano-loop profile`: where the time of a training step of a script goes."""

from __future__ import annotations

import os

import click

from nano_loop.cli.output import as_text
from nano_loop.cli.script import result_of
from nano_loop.cli.script_options import Script, ScriptCommand, takes_script
from nano_loop.errors import NanoConfigError, error_message
from nano_loop.profiling.kinds import lines_of

_EXAMPLES = """\b
Examples:
  nano-loop profile train.py
  nano-loop profile --precision bf16 --trace trace.json train.py --epochs 3
"""


@click.command(cls=ScriptCommand, context_settings={"allow_interspersed_args": False}, epilog=_EXAMPLES)
@click.option("--trace", type=click.Path(dir_okay=False, writable=True), help="Write a trace that Perfetto opens.")
@takes_script()
def profile(script: Script, as_json: bool, trace: str | None) -> None:
    """Show where the time of a step goes.

    The script runs until some steps of its first optimizer are timed and profiled, and then ends. Options override
    those in the code.
    """
    if trace is not None and not os.path.isdir(os.path.dirname(os.path.abspath(trace))):
        raise NanoConfigError(
            error_message(f"--trace {trace}", "its folder does not exist", "Name a file in one that does")
        )
    own = {"trace": None if trace is None else os.path.abspath(trace)}
    content = result_of("profile", own, script, to_stderr=as_json)
    if as_json:
        click.echo(as_text("profile", **content))
    else:
        click.echo("\n".join(lines_of(content)))
