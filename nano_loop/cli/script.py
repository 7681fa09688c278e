"""The script of a command: its arguments, the options of nano_loop, its start, and the answer it writes."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import click

from nano_loop.cli.at_start import search_path
from nano_loop.config import option_checks as checks
from nano_loop.config.declarations import CHECKS, DECLARED, DEFAULTS
from nano_loop.config.environment import may_be, variable_of
from nano_loop.config.leftovers import REMOVED, REMOVED_OTHERS
from nano_loop.config.options import Options
from nano_loop.config.protocol import COMMAND, INSTALL, Command
from nano_loop.cpu import partition, read_machine
from nano_loop.cpu.process import end_with
from nano_loop.distributed.launch_external.environment import found_launch
from nano_loop.errors import NanoConfigError, error_message

_T = TypeVar("_T")
#: The options that the help lists first, with their full descriptions.
_MOST_USED = ("precision", "channels_last", "num_processes", "exact", "memory_limit")


def flag_of(option: str) -> str:
    """Return the flag of an option: ``--num-processes`` for ``num_processes``."""
    return "--" + option.replace("_", "-")


#: The flags of options that may be on or off, and their values.
_SWITCHES = {
    flag_of(prefix + name): f"{flag_of(name)}={prefix == ''}"
    for name, check in CHECKS.items()
    if may_be(True, check)
    for prefix in ("", "no_")
}


class NanoOption(click.Option):
    """An option of nano_loop for the script."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the entry in the help: the syntax and a short description."""
        (flag,), text = self.opts, self.help or ""
        if self.name not in _MOST_USED:
            text = re.split(r"[.:;] ", text)[0].removesuffix(".") + "."
        text = text.replace("`", "")  # of Markdown
        default = {True: "on", "32": 32}.get(DEFAULTS[self.name], DEFAULTS[self.name])
        if default not in (None, False, (), "auto"):
            text += f" [default: {default}]"
        return (f"--[no-]{flag[2:]}" if flag in _SWITCHES else f"{flag} VALUE"), text


class NanoCommand(click.Command):
    """A command that tells the user what to do about a removed flag."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            option = error.option_name.removeprefix("--").removeprefix("no-").replace("-", "_")
            removed = REMOVED.get(option) or REMOVED_OTHERS.get(f"{self.name} {error.option_name}")
            if removed is None:
                raise
            raise NanoConfigError(error_message(error.option_name, *removed)) from None


class ScriptCommand(NanoCommand):
    """A command that runs a script. Its help shows nano_loop's options after those of the command."""

    allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments. On/off flags accept other values only after ``=``, as in ``--verbose=all``."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        with_values = {flag for option in options if not option.is_flag for flag in option.opts}
        args, place = [*args], 0
        while place < len(args) and args[place].startswith("-") and args[place] not in ("-", "--"):
            args[place] = _SWITCHES.get(args[place], args[place])
            place += 1 + (args[place] in with_values)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the command, then those of nano_loop, the most used first."""
        options = {str(option.name): option for option in self.get_params(ctx) if isinstance(option, click.Option)}
        ordered = [options[name] for name in dict.fromkeys((*_MOST_USED, *options))]
        for heading, is_nanos in (("Options", False), ("Options of nano_loop, which override the code's", True)):
            shown = [option for option in ordered if isinstance(option, NanoOption) is is_nanos]
            with formatter.section(heading):
                formatter.write_dl([record for option in shown if (record := option.get_help_record(ctx)) is not None])
        formatter.write_paragraph()
        formatter.write_text("help(nano_loop.nano) shows the full description of each option.")


class Script(NamedTuple):
    """A script that exists, or a module."""

    name: str  # its path, or its dotted name
    command: list[str]  # the command line that runs it, with its arguments
    variables: dict[str, str]  # the environment variables of the options of nano_loop for it


def takes_script(json_help: str = "Print one JSON object instead of text.") -> Callable[[Callable[..., _T]], Any]:
    """Return a decorator that passes a `Script` as ``script`` and `--json` as ``as_json`` to a command."""

    def decorate(function: Callable[..., _T]) -> Any:
        @functools.wraps(function)
        def command(script: str, arguments: tuple[str, ...], is_module: bool, **values: Any) -> _T:
            options = {name: values.pop(name, None) for name in CHECKS}
            _refuse_missing(script, is_module)
            # A script whose name looks like an option needs "--" before it, for Python as for this command.
            before = ["-m"] if is_module else ["--"] if script.startswith("-") and script != "-" else []
            line = [sys.executable, *before, script, *arguments]
            return function(script=Script(script, line, _variables_of(options)), **values)

        command = click.argument("arguments", nargs=-1, type=click.UNPROCESSED)(command)
        command = click.argument("script")(command)
        for option in reversed(DECLARED):
            if option.metadata["check"] is not checks.worker_init:  # a function cannot be written as text
                command = click.option(flag_of(option.name), cls=NanoOption, help=option.metadata["help"])(command)
        command = click.option("--json", "as_json", is_flag=True, help=json_help)(command)
        return click.option("--module", "-m", "is_module", is_flag=True, help="Run a module, as `python -m` does.")(
            command
        )

    return decorate


def preload_options(function: Callable[..., _T]) -> Callable[..., _T]:
    """Add the options that preload libraries; the command receives their names as ``preload``."""

    @click.option("--intel-openmp", is_flag=True, help="Preload Intel's OpenMP, if it is found.")
    @click.option("--tcmalloc", "--enable-tcmalloc", "-t", is_flag=True, help="Preload tcmalloc, if it is found.")
    @click.option("--jemalloc", "--enable-jemalloc", "-j", is_flag=True, help="Preload jemalloc, if it is found.")
    @functools.wraps(function)
    def command(jemalloc: bool, tcmalloc: bool, intel_openmp: bool, **others: Any) -> _T:
        if jemalloc and tcmalloc:
            both = "--jemalloc with --tcmalloc: a process can use only one allocator"
            raise click.UsageError(both, click.get_current_context())
        options = {"intel-openmp": intel_openmp, "jemalloc": jemalloc, "tcmalloc": tcmalloc}
        return function(preload=tuple(name for name, wanted in options.items() if wanted), **others)

    return command


def _variables_of(options: Mapping[str, str | None]) -> dict[str, str]:
    """Return the variables of the options that have a value; raise an error here for those that a run refuses."""
    variables = {variable_of(name): text for name, text in options.items() if text is not None}
    _refuse_too_many_processes(Options.from_call({}, variables, flag_of))
    return variables


def _refuse_too_many_processes(options: Options) -> None:
    """Raise an error if a run would start more processes than there are cores, unless Ray starts them elsewhere."""
    shares = options.cpu_for_each_process
    if options.num_processes is not None and options.distributed_backend != "ray" and found_launch(os.environ) is None:
        try:
            partition(read_machine(), options.processes, shares if isinstance(shares, int) else None)
        except NanoConfigError as error:
            raise NanoConfigError(f"{error} To use other hosts, write --distributed-backend ray.") from None


def _refuse_missing(script: str, is_module: bool) -> None:
    if is_module and not _is_module(script.partition(".")[0]):
        expected, hint = "there is no such module", "Check its name and the working folder"
        raise NanoConfigError(error_message(f"-m {script}", expected, hint))
    if not is_module and script != "-" and not os.path.exists(script):
        hint = "Check the path of the script, and write the value of a flag with =: --channels-last=auto"
        raise NanoConfigError(error_message(script, "there is no such file", hint))


def _is_module(name: str) -> bool:
    """Whether a top-level module exists, without importing it."""
    sys.path.insert(0, os.getcwd())  # as in the new process
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        del sys.path[0]


@contextlib.contextmanager
def started(
    command: str, own: Mapping[str, Any], line: Sequence[str], environ: Mapping[str, str], **streams: Any
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], dict[str, Any] | None]]]:
    """Start a script in which each Python process executes a command, with `own` arguments, once it begins to train.

    Yields the process, which is killed on exit, and a function that returns the answer of the script, or None.
    """
    # With /proc, the file is anonymous, so that a killed command leaves no file behind.
    is_named = not os.path.exists("/proc/self/fd")
    with tempfile.NamedTemporaryFile() if is_named else tempfile.TemporaryFile() as file:

        def read_answer() -> dict[str, Any] | None:
            file.seek(0)
            try:
                answer: dict[str, Any] = json.load(file)
            except ValueError:  # the answer is missing or incomplete
                return None
            return answer

        path = file.name if is_named else f"/proc/{os.getpid()}/fd/{file.fileno()}"
        variables = {COMMAND: Command(command, path, dict(own)).encoded(), INSTALL: command}
        process = subprocess.Popen(
            line,
            env={**environ, **variables, "PYTHONPATH": search_path(environ)},
            preexec_fn=partial(end_with, os.getpid()) if os.name == "posix" else None,  # no thread runs here
            **streams,
        )
        try:
            yield process, read_answer
        finally:
            process.kill()
            process.wait()


def exit_with(code: int) -> click.exceptions.Exit:
    """Return the exception that ends a command with the script's exit code, as shells report it, also for signals."""
    return click.exceptions.Exit(code if code > 0 else 128 - code)
