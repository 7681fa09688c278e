"""The entry point of the command line. It prints errors in one line each, even if click is missing."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from nano_loop.config.leftovers import REMOVED_OTHERS
from nano_loop.errors import NanoConfigError, NanoError, error_message, quoted

_BAD_INPUT = 2
_INTERRUPTED = 130  # the exit code of shells for Ctrl-C
_LONGEST = 400  # maximum characters of a line about arguments that are not options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; return 0, or 1 if `doctor`'s findings hurt, or 2 for invalid input."""
    arguments = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    _open_closed_streams()
    try:
        return _run(arguments)
    except NanoError as error:
        return _refused(str(error))
    except OSError as error:  # no disk space for the output, no working folder, or too long arguments
        reason = f"the operating system reported an error ({error.strerror or error})"
        hint = "Check the working folder, the space on the disk and the length of the arguments"
        return _refused(error_message(f"nano-loop {arguments[0]}", reason, hint))


def _run(arguments: Sequence[str]) -> int:
    if arguments[0] == "doctor" and any(argument.partition("=")[0] == "--torch" for argument in arguments):
        raise NanoConfigError(error_message("--torch", *REMOVED_OTHERS["doctor --torch"]))
    if importlib.util.find_spec("click") is None:
        if arguments[0] == "doctor":
            return _doctor(arguments[1:])
        expected = "nano-loop's command line needs click"
        return _refused(error_message("click is not installed", expected, 'Run: pip install "click>=8.1"'))
    import click

    from nano_loop.cli.app import app

    # By default, click prints colours only to terminals.
    color = False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None
    try:
        return int(app.main(args=arguments, prog_name="nano-loop", standalone_mode=False, color=color) or 0)
    except click.ClickException as error:
        return _refused(_in_one_line(error))
    except click.Abort:
        return _INTERRUPTED


def _open_closed_streams() -> None:
    """Open closed standard streams on the null device, so that no file gets their descriptors; scripts inherit none."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _doctor(arguments: Sequence[str]) -> int:
    """Run `doctor` without click, which may be the missing package."""
    import argparse

    from nano_loop.cli.doctor import diagnose

    parser = argparse.ArgumentParser("nano-loop doctor")
    parser.add_argument("--json", action="store_true")
    text, code = diagnose(parser.parse_args(arguments).json, lambda words, **_: str(words))
    print(text, flush=True)
    return code


def _refused(message: str) -> int:
    """Print each line of a message to standard error, and return the exit code for invalid input."""
    for line in message.splitlines():
        print(f"nano-loop: {line}", file=sys.stderr)
    return _BAD_INPUT


def _in_one_line(error: Any) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "nano-loop"
    if getattr(error, "possibilities", None):
        # The first is the closest: click offers up to three, such as --json for --precison.
        error.possibilities = error.possibilities[:1]
    message = quoted(" ".join(error.format_message().split()).rstrip("."), _LONGEST)
    end = "" if message.endswith(("?", "?)")) else "."
    return f"{message}{end} See `{command} --help`."
