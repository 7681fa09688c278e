"""What `nano-loop tune` does in the process of a script that does not use nano_loop, from its first optimizer on."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, NoReturn

from torch.optim import Optimizer

from nano_loop.config.protocol import Command, take_command
from nano_loop.distributed.launch.active_runs import innermost
from nano_loop.errors import NanoError
from nano_loop.patching.objects.optimizers import hook_after_steps
from nano_loop.runtime.objects.report import SetupReport
from nano_loop.search.trial import Gate, comparison_in
from nano_loop.search.trial_processes import Line


def begin_requested(install: Any, uninstall: Any, report: Any) -> None:
    """Do what a command asks for when the script trains. Then the process ends.

    Parameters
    ----------
    install, uninstall, report : callable
        Those of nano_loop.
    """
    command = take_command()
    if command is not None and command.name == "tune":
        hook_after_steps(_Contact(command))
    elif command is not None and command.name == "trial":
        _begin_trial(command, install, uninstall, report)


class _Contact:
    """Tells the command, which waits for this process, that the script trains without nano_loop."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._process = os.getpid()

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if innermost() is None and os.getpid() == self._process:
            self._command.answer(result={})
            _exit()


def _begin_trial(command: Command, install: Any, uninstall: Any, report: Any) -> None:
    arguments = command.arguments
    line, options = Line(arguments["requests"], arguments["answers"]), arguments["options"]

    def compare() -> NoReturn:
        uninstall()  # `verify` has its result when it is undone
        line.answer(comparison=comparison_in(report()))
        _exit()

    def result() -> SetupReport | None:
        return None if arguments["is_plain"] else report()

    if not arguments["is_plain"]:
        try:
            install(**options)
        except NanoError as error:
            print(error, file=sys.stderr)
            _exit(2)
    Gate(line, result, at_first=compare if options["verify"] else None)


def _exit(code: int = 0) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have closed or replaced it
            stream.flush()
    os._exit(code)  # what follows in the script belongs to a training
