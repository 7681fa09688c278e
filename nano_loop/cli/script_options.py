"""What commands that run a script take: the script, its arguments, and each option of nano_loop that text can say."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import click

from nano_loop.config import option_checks as checks
from nano_loop.config.declarations import CHECKS, DECLARED
from nano_loop.config.environment import read_options, variable_of
from nano_loop.config.options import Options
from nano_loop.errors import NanoConfigError, error_message

_T = TypeVar("_T")
_SWITCHES = (checks.boolean, checks.auto_or_boolean)
_NO_TEXT = (checks.worker_init,)  # a function


class Script(NamedTuple):
    """A script that exists, or a module."""

    name: str  # its path, or its dotted name
    command: list[str]  # what runs it, with its arguments
    variables: dict[str, str]  # the environment variables of the options of nano_loop for it


def takes_script(json_help: str = "Print JSON. docs/cli.md describes it.") -> Callable[[Callable[..., _T]], Any]:
    """Return a decorator that lets a command take a `Script` as ``script``, and `--json` as ``as_json``."""

    def decorate(function: Callable[..., _T]) -> Any:
        @functools.wraps(function)
        def command(script: str, arguments: tuple[str, ...], is_module: bool, **values: Any) -> _T:
            options = {name: values.pop(name, None) for name in CHECKS}
            _refuse_missing(script, is_module)
            line = [sys.executable, *(["-m"] if is_module else []), script, *arguments]
            return function(script=Script(script, line, _variables_of(options)), **values)

        command = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)(command)
        command = click.argument("script")(command)
        for option in reversed(DECLARED):
            check, text = option.metadata["check"], option.metadata["help"]
            flag = flag_of(option.name)
            if check in _SWITCHES:
                command = click.option(f"{flag}/--no-{flag[2:]}", option.name, default=None, help=text)(command)
            elif check not in _NO_TEXT:
                command = click.option(flag, option.name, metavar="VALUE", help=text)(command)
        command = click.option("--json", "as_json", is_flag=True, help=json_help)(command)
        return click.option("--module", "-m", "is_module", is_flag=True, help="Run a module, as `python -m` does.")(
            command
        )

    return decorate


def preload_options(function: Callable[..., _T]) -> Callable[..., _T]:
    """Add the options by which a command preloads libraries; it takes their names as ``preload``."""

    @click.option("--intel-openmp", is_flag=True, help="Preload Intel's OpenMP, if it is found.")
    @click.option("--tcmalloc", "--enable-tcmalloc", "-t", is_flag=True, help="Preload tcmalloc, if it is found.")
    @click.option("--jemalloc", "--enable-jemalloc", "-j", is_flag=True, help="Preload jemalloc, if it is found.")
    @functools.wraps(function)
    def command(jemalloc: bool, tcmalloc: bool, intel_openmp: bool, **others: Any) -> _T:
        if jemalloc and tcmalloc:
            both = "--jemalloc with --tcmalloc: a process has one allocator"
            raise click.UsageError(both, click.get_current_context())
        options = {"intel-openmp": intel_openmp, "jemalloc": jemalloc, "tcmalloc": tcmalloc}
        return function(preload=tuple(name for name, wanted in options.items() if wanted), **others)

    return command


def flag_of(option: str) -> str:
    """Return the flag of an option: ``--num-processes`` for ``num_processes``."""
    return "--" + option.replace("_", "-")


def _variables_of(options: Mapping[str, bool | str | None]) -> dict[str, str]:
    """Return the environment variables of the options that have a value."""
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
    variables = {variable_of(name): text for name, text in texts.items()}
    Options.from_call({}, variables)  # which contradict each other is an error here, and not in the script
    return variables


def _refuse_missing(script: str, is_module: bool) -> None:
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
