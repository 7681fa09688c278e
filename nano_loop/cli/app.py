"""The command line as one click group."""

from __future__ import annotations

import click

from nano_loop.cli.doctor import doctor
from nano_loop.cli.env import env
from nano_loop.cli.profile import profile
from nano_loop.cli.run import run
from nano_loop.cli.tune import tune
from nano_loop.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example: nano-loop doctor")
@click.version_option(__version__, prog_name="nano-loop", message="%(prog)s %(version)s")
def app() -> None:
    """See what a machine offers to PyTorch, and run training scripts on it."""


for command in (doctor, env, profile, run, tune):
    app.add_command(command)
