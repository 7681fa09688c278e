"""The command line as one click group, and its command `doctor`."""

from __future__ import annotations

import importlib

import click

from nano_loop.version import __version__


class _Commands(click.Group):
    """A group of commands that are imported from their modules on first use."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command with this name, or None."""
        if cmd_name not in _IN_FILES:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(importlib.import_module(f"nano_loop.cli.{cmd_name}"), cmd_name)
        return command


_IN_FILES = ("env", "profile", "run", "tune")
_HELP = {"help_option_names": ["-h", "--help"]}


@click.group(cls=_Commands, context_settings=_HELP, epilog="Example: nano-loop doctor")
@click.version_option(__version__, prog_name="nano-loop", message="%(prog)s %(version)s")
def app() -> None:
    """Inspect a machine for PyTorch training, and run training scripts on it."""


@app.command(epilog="Example: nano-loop doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def doctor(as_json: bool) -> int:
    """Show the machine, and anything that slows down training on it.

    It also shows which part of it this process may use. The exit code is 1 if a finding hurts, and 0 otherwise.
    """
    from nano_loop.cli.doctor import diagnose  # imported here to save 30 ms in other commands

    text, code = diagnose(as_json, click.style)
    click.echo(text)
    return code


for name in _IN_FILES:
    app.add_command(click.Command(name))  # its name only: help lists it, and errors suggest it
