"""The request of a command or an option that something is measured before a run, or in place of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import NoReturn

from nano_loop.config.environment import option_of
from nano_loop.config.options import Options
from nano_loop.config.protocol import Command, take_command
from nano_loop.distributed.launch.active_runs import innermost
from nano_loop.distributed.launch_external.environment import found_launch
from nano_loop.errors import NanoConfigError, NanoError, NanoWorkerError, error_message
from nano_loop.runtime.objects.report import print_lines
from nano_loop.runtime.run import RunTask
from nano_loop.runtime.settings import Settings
from nano_loop.storage.cache_folder import cache_folder

#: Several processes train with larger batches, which nobody has asked for who asks for speed alone.
_NOT_BEFORE_TRAINING = ("num_processes",)

INTERRUPTED = 130  # the exit code of a command that Ctrl-C has ended, as shells have it


def requested(options: Options) -> Command | None:
    """Return what is requested of a run that is to begin here; nothing of a run inside of another, as in a trial."""
    command = take_command()
    if innermost() is not None:
        return None
    return command or (Command("tune", None, {}) if options.tune else None)


def measure(command: Command | None, task: RunTask, written: Collection[str]) -> Settings:
    """Search for options if that is requested, which may take minutes, and return the settings of the task.

    For ``nano-loop tune`` it does not return: it leaves the result to the command, and ends the process.

    Parameters
    ----------
    command : Command or None
        What `requested` has returned.
    task : RunTask
        The task, with the settings that the code and the environment ask for.
    written : collection of str
        The options that the code gives.

    Raises
    ------
    NanoError
        If the loop cannot be copied, or fails in a trial.
    """
    settings = task.settings
    if command is not None and command.name == "tune":
        return _searched(task, written) if command.result is None else _answer(command, task)
    return settings.changed(tune=False) if settings.options.tune else settings


def _searched(task: RunTask, written: Collection[str]) -> Settings:
    from nano_loop.search.search import search

    options = task.settings.options
    _refuse_launch()
    tuning = search(
        task,
        task.settings,
        {*written, *options_of_environment(options), *_NOT_BEFORE_TRAINING},
        verbose=bool(options.verbose),
    )
    if options.verbose:
        kept = f"kept from {tuning.date}; delete options-*.json in {cache_folder()} to measure anew"
        print_lines([f"tune: {tuning.line} ({kept})" if tuning.cached else tuning])
    return tuning.settings(task.settings)


def _answer(command: Command, task: RunTask) -> NoReturn:
    from nano_loop.search.search import SearchInterrupted, search

    code = 0
    try:
        _refuse_launch()
        tuning = search(
            task, task.settings, options_of_environment(task.settings.options), **command.arguments, verbose=True
        )
        command.answer(result=tuning.as_dict())
    except NanoWorkerError as error:  # the loop itself, which ends as under python
        print(error.traceback or error, file=sys.stderr)
        code = 1 if error.exitcode is None else error.exitcode if error.exitcode >= 0 else 128 - error.exitcode
    except NanoError as error:
        command.answer(error=str(error))
        code = 2
    except SearchInterrupted as interrupt:
        command.answer(result=interrupt.tuning.as_dict(), interrupted=True)
        code = INTERRUPTED
    except KeyboardInterrupt:
        code = INTERRUPTED
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have closed or replaced it
            stream.flush()
    # At once: what follows the call in the script, such as saving the model, belongs to a training.
    os._exit(code)


def options_of_environment(options: Options) -> set[str]:
    """Return the names of the options that the environment has set."""
    return {option_of(setting.partition("=")[0]) for setting in options.from_environment}


def _refuse_launch() -> None:
    launch = found_launch(os.environ)
    if launch is not None:
        got = f"tune under {launch.launcher}"
        raise NanoConfigError(error_message(got, "trials start their own processes", "Tune in one process first"))
