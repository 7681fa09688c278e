"""`nano-loop env`: lines that set up a POSIX shell for training on this machine, and lines that undo it."""

from __future__ import annotations

import os
import shlex

import click

from nano_loop.cli import as_text
from nano_loop.cli.script import NanoCommand, preload_options
from nano_loop.cli.training_environment import before_exports, changes_between, exported, training_environment
from nano_loop.config.environment import EXPORTS
from nano_loop.cpu import read_machine
from nano_loop.errors import quoted

_EXAMPLES = """\b
Examples:
  eval "$(nano-loop env)"
  eval "$(nano-loop env --install)"
  eval "$(nano-loop env --undo)"
"""


@click.command(cls=NanoCommand, epilog=_EXAMPLES)
@click.option("--undo", "-u", is_flag=True, help="Print the lines that restore the previous values.")
@click.option("--install", is_flag=True, help="Accelerate training in each Python started from the shell.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@preload_options
@click.option("--disable-openmp", "-o", is_flag=True, hidden=True, expose_value=False, help="BigDL-Nano's.")
@click.option("--disable-allocator", "-c", is_flag=True, hidden=True, expose_value=False, help="BigDL-Nano's.")
def env(undo: bool, install: bool, as_json: bool, preload: tuple[str, ...]) -> None:
    """Print lines that set up a POSIX shell for training.

    A variable that is already set stays unchanged, with a note on standard error. LD_PRELOAD is extended.
    """
    if undo and (preload or install):
        raise click.UsageError(
            "--undo restores everything, so it accepts no library and no --install.", click.get_current_context()
        )
    now = dict(os.environ)
    before = before_exports(now)
    kept: list[str] = []
    then = before
    if not undo:
        made = training_environment(read_machine(), before, preload, installs=install)
        kept, then = made.kept, exported(before, made)
    changes = changes_between(now, then)
    if as_json:
        click.echo(as_text("env", undo=undo, changes=changes, kept=kept))
        return
    lines = [f"unset {name}" if v is None else f"export {name}={shlex.quote(v)}" for name, v in changes.items()]
    click.echo(os.fsencode("".join(f"{line}\n" for line in lines)), nl=False)
    if undo and EXPORTS not in now:
        click.echo("nano-loop: there is nothing to undo in this shell.", err=True)
    for name in kept:
        value = quoted(before[name])
        click.echo(f"nano-loop: {name}={value} is set, and is kept. To replace it, unset it first.", err=True)
