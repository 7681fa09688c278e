"""`nano-loop run`: run a script in the environment for training on this machine, and accelerate its training."""

from __future__ import annotations

import os
import sys

import click

from nano_loop.cli import as_text
from nano_loop.cli.script import Script, ScriptCommand, preload_options, takes_script
from nano_loop.cli.training_environment import before_exports, changes_between, exported, training_environment
from nano_loop.config.protocol import INSTALL
from nano_loop.cpu import read_machine

_OWN_RUNS = (
    "nano-loop: with --only-environment, options affect only the script's own runs: functions under @nano, TorchNano, "
    "accelerated and Lightning's Trainer"
)
_EXAMPLES = """\b
Examples:
  nano-loop run --precision bf16 train.py --epochs 3
  nano-loop run --num-processes 2 -m package.train
"""


@click.command(cls=ScriptCommand, epilog=_EXAMPLES)
@preload_options
@click.option("--only-environment", is_flag=True, help="Accelerate only the script's own runs of nano_loop.")
@takes_script("Print the command as JSON without running it.")
def run(script: Script, as_json: bool, preload: tuple[str, ...], only_environment: bool) -> None:
    """Run a script, and accelerate its training.

    It runs in the environment of `nano-loop env`. The options of nano_loop override those in the code. Write them
    before the script, and values of a switch after "=", as in --channels-last=auto. Arguments after the script are
    passed to it.
    """
    before = before_exports(os.environ)
    made = training_environment(read_machine(), before, preload, installs=not only_environment)
    environ = {**exported(before, made), **script.variables}
    if only_environment:
        environ.pop(INSTALL, None)  # set if this process has called `install`
        if script.variables:
            click.echo(_OWN_RUNS, err=True)
    if as_json:
        click.echo(as_text("run", arguments=script.command, changes=changes_between(os.environ, environ)))
        return
    sys.stdout.flush()
    # Replace this process, so that signals, standard streams and the exit code are the script's.
    os.execve(sys.executable, script.command, environ)
