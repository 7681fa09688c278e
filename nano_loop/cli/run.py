"""`nano-loop run`: runs a script in the environment for training on this machine, and accelerates what it trains."""

from __future__ import annotations

import os
import sys

import click

from nano_loop.cli import as_text
from nano_loop.cli.script_options import Script, ScriptCommand, preload_options, takes_script
from nano_loop.cli.training_environment import before_exports, changes_between, exported, training_environment
from nano_loop.config.protocol import INSTALL
from nano_loop.cpu import read_machine

_OWN_RUNS = (
    "nano-loop: with --only-environment options act on the script's own runs alone: functions under @nano, TorchNano, "
    "accelerated and Lightning's Trainer"
)
_EXAMPLES = """\b
Examples:
  nano-loop run --precision bf16 train.py --epochs 3
  nano-loop run --num-processes 2 -m package.train
"""


@click.command(cls=ScriptCommand, epilog=_EXAMPLES)
@preload_options
@click.option("--only-environment", is_flag=True, help="Accelerate nothing that the script does not ask for.")
@takes_script("Print what would be run as JSON, and run nothing.")
def run(script: Script, as_json: bool, preload: tuple[str, ...], only_environment: bool) -> None:
    """Run a script, and accelerate what it trains.

    Its environment is the one that `nano-loop env` makes. The options of nano_loop override those in the code. Write
    them before the script; arguments after it are passed to the script.
    """
    before = before_exports(os.environ)
    made = training_environment(read_machine(), before, preload, installs=not only_environment)
    environ = {**exported(before, made), **script.variables}
    if only_environment:
        environ.pop(INSTALL, None)  # of a process that has called `install`
        if script.variables:
            click.echo(_OWN_RUNS, err=True)
    if as_json:
        click.echo(as_text("run", arguments=script.command, changes=changes_between(os.environ, environ)))
        return
    sys.stdout.flush()
    # The same process, so that signals, standard streams and the exit code are the script's.
    os.execve(sys.executable, script.command, environ)
