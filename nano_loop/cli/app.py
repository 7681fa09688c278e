"""The command line as one click group, whose refusals are one line each."""

from __future__ import annotations

from collections.abc import Sequence

import click

from nano_loop.cli.doctor import doctor
from nano_loop.cli.env import env
from nano_loop.cli.profile import profile
from nano_loop.cli.refusal import refused
from nano_loop.cli.run import run
from nano_loop.cli.tune import tune
from nano_loop.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example: nano-loop doctor")
@click.version_option(__version__, prog_name="nano-loop", message="%(prog)s %(version)s")
def app() -> None:
    """See what a machine offers to PyTorch, and run training scripts on it."""


app.add_command(doctor)
app.add_command(env)
app.add_command(profile)
app.add_command(run)
app.add_command(tune)


def run_app(arguments: Sequence[str]) -> int:
    """Run a command, and return its exit code."""
    try:
        code = app.main(args=[*arguments] or ["--help"], prog_name="nano-loop", standalone_mode=False)
    except click.ClickException as error:
        return refused(_in_one_line(error))
    except click.Abort:
        return 130  # as a shell has it for Ctrl-C
    return int(code or 0)


def _in_one_line(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "nano-loop"
    message = " ".join(error.format_message().split()).rstrip(".")
    end = "" if message.endswith(("?", "?)")) else "."
    return f"{message}{end} See `{command} --help`."
