"""`nano-loop run`: runs a script in the environment for training on this machine, with options of nano_loop."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TypeVar

import click

from nano_loop.cli.at_start import with_line_at_end
from nano_loop.cli.output import print_json
from nano_loop.cli.preload_options import preload_options
from nano_loop.cli.training_environment import before_exports, changes_between, exported, training_environment
from nano_loop.config import option_checks as checks
from nano_loop.config.environment import read_options, variable_of
from nano_loop.config.options import CHECKS, Options
from nano_loop.cpu import read_machine
from nano_loop.errors import NanoConfigError, error_message

_T = TypeVar("_T")
_SWITCHES = (checks.boolean, checks.auto_or_boolean)
_NO_TEXT = (checks.worker_init,)  # a function


def run_options(function: Callable[..., _T]) -> Callable[..., _T]:
    """Add an option to the command for each option of nano_loop that can be written as text."""
    for option in reversed([field for field in fields(Options) if field.init]):
        check, text = option.metadata["check"], option.metadata["help"]
        flag = flag_of(option.name)
        if check in _SWITCHES:
            function = click.option(f"{flag}/--no-{flag[2:]}", option.name, default=None, help=text)(function)
        elif check not in _NO_TEXT:
            function = click.option(flag, option.name, metavar="VALUE", help=text)(function)
    return function


def flag_of(option: str) -> str:
    """Return the flag of an option: ``--num-processes`` for ``num_processes``."""
    return "--" + option.replace("_", "-")


_EXAMPLES = """\b
Examples:
  nano-loop run --precision bf16 train.py --epochs 3
  nano-loop run --num-processes 2 -m package.train
"""


@click.command(context_settings={"allow_interspersed_args": False}, epilog=_EXAMPLES)
@click.option("--module", "-m", "is_module", is_flag=True, help="Run a module, as `python -m` does.")
@click.option("--json", "as_json", is_flag=True, help="Print what would be run as JSON, and run nothing.")
@preload_options
@run_options
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    script: str,
    arguments: tuple[str, ...],
    is_module: bool,
    as_json: bool,
    preload: tuple[str, ...],
    **options: bool | str | None,
) -> None:
    """Run a script with options of nano_loop, in the environment that `nano-loop env` makes.

    The options override those in the code. Write them before the script; what follows it is passed to the script.
    """
    refuse_missing(script, is_module)
    chosen = variables_of(options)
    before = before_exports(os.environ)
    environ = {**exported(before, training_environment(read_machine(), before, preload)), **chosen}
    command = [sys.executable, *(["-m"] if is_module else []), script, *arguments]
    if as_json:
        print_json("run", arguments=command, changes=changes_between(os.environ, environ))
        return
    sys.stdout.flush()
    # The same process, so that signals, standard streams and the exit code are the script's.
    os.execve(sys.executable, command, with_line_at_end(environ, script))


def variables_of(options: Mapping[str, bool | str | None]) -> dict[str, str]:
    """Return the environment variables of the options that were given.

    Raises
    ------
    NanoConfigError
        If a value is not allowed.
    """
    texts = {name: str(value) for name, value in options.items() if value is not None}
    values, _ = read_options({variable_of(name): text for name, text in texts.items()}, CHECKS)
    problems = []
    for name, (_, value) in values.items():
        try:
            CHECKS[name](value)
        except checks.RefusedValueError as refused:
            problems.append(error_message(f"{flag_of(name)} {texts[name]}", *refused.args))
    if problems:
        raise NanoConfigError("\n".join(problems))
    return {variable_of(name): text for name, text in texts.items()}


def refuse_missing(script: str, is_module: bool) -> None:
    """Raise a `NanoConfigError` if there is no such script or module."""
    if is_module and not _is_module(script.partition(".")[0]):
        expected, hint = "there is no such module", "Check its name and the working folder"
        raise NanoConfigError(error_message(f"-m {script}", expected, hint))
    if not is_module and script != "-" and not os.path.exists(script):
        raise NanoConfigError(error_message(script, "there is no such file", "Check the path of the script"))


def _is_module(name: str) -> bool:
    """Whether Python has a top-level module, which is not imported."""
    sys.path.insert(0, os.getcwd())  # as the new process has it
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]
