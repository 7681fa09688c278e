"""The command line as one click group, and its command `doctor`."""

from __future__ import annotations

import click

from nano_loop.cli.env import env
from nano_loop.cli.profile import profile
from nano_loop.cli.run import run
from nano_loop.cli.tune import tune
from nano_loop.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example: nano-loop doctor")
@click.version_option(__version__, prog_name="nano-loop", message="%(prog)s %(version)s")
def app() -> None:
    """See what a machine offers to PyTorch, and run training scripts on it."""


@app.command(epilog="Example: nano-loop doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--torch", "with_torch", is_flag=True, help="Also import torch, in another process: takes seconds.")
def doctor(as_json: bool, with_torch: bool) -> int:
    """Show the machine, and what slows training down on it.

    It also shows what of it this process may use. The exit code is 1 if a finding hurts, and 0 otherwise.
    """
    from nano_loop.cli.doctor import diagnose  # 30 ms that other commands need not wait for

    text, code = diagnose(as_json, with_torch, click.style)
    click.echo(text)
    return code


for command in (env, profile, run, tune):
    app.add_command(command)
