"""The settings of the run that is to begin: after a search, if the options or a command ask for one."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NoReturn

from nano_loop.command_note import Command, commanded
from nano_loop.distributed.launch.external.environment import found_launch
from nano_loop.distributed.launch.under_way import innermost
from nano_loop.environment import option_of
from nano_loop.errors import NanoConfigError, NanoError, problem
from nano_loop.options import Options
from nano_loop.run import RunTask
from nano_loop.settings import Settings
from nano_loop.trials.candidates import changed

#: Several processes train with larger batches, which nobody has asked for who asks for speed alone.
_NOT_BEFORE_TRAINING = ("num_processes",)

_INTERRUPTED = 130  # the exit code of a command that Ctrl-C has ended, as shells have it


def is_commanded() -> bool:
    """Whether nano-loop has started this script for a search, and no run has begun yet."""
    command = commanded()
    return command is not None and command.name == "tune" and innermost() is None


def settings_for(task: RunTask, given: Collection[str]) -> Settings:
    """Return the settings with which a task is to run.

    Under ``nano-loop tune`` it does not return: it searches, leaves the result to the command, and ends the process.

    Parameters
    ----------
    task : RunTask
        The task, with the settings that the code and the environment ask for.
    given : collection of str
        The options that the code gives.

    Raises
    ------
    NanoError
        If the loop cannot be copied, or fails in a trial.
    """
    settings = task.settings
    if innermost() is not None:  # a run inside of one, also in a trial
        return _without_search(settings)
    if is_commanded():
        command = commanded()
        assert command is not None
        _answer(command, task, settings)
    command = commanded()
    if command is not None and command.name == "profile":
        from nano_loop.profiling.recorder import record

        record(command, settings.machine)
        return _without_search(settings)
    if not settings.options.tune:
        return settings
    from nano_loop.trials.remembered import found_before_or_now

    _refuse_launch(settings.options)
    fixed = {*given, *_of_environment(settings.options), *_NOT_BEFORE_TRAINING}
    tuning = found_before_or_now(task, settings, fixed)
    if settings.options.verbose:
        print(tuning if not tuning.cached else f"tune: {tuning.line} (kept from an earlier search)", file=sys.stderr)
    return tuning.settings(settings)


def _answer(command: Command, task: RunTask, settings: Settings) -> NoReturn:
    from nano_loop.trials.remembered import found_before_or_now

    code = 0
    try:
        _refuse_launch(settings.options)
        tuning = found_before_or_now(task, settings, {*_of_environment(settings.options)}, **command.arguments)
        command.answer(tuning=tuning.as_dict())
    except NanoError as error:
        command.answer(error=str(error))
        code = 2
    except KeyboardInterrupt:
        code = _INTERRUPTED
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have closed or replaced it
            stream.flush()
    # At once: what follows the call in the script, such as saving the model, belongs to a training.
    os._exit(code)


def _without_search(settings: Settings) -> Settings:
    return changed(settings, {"tune": False}) if settings.options.tune else settings


def _of_environment(options: Options) -> Iterator[str]:
    """Yield the options that the environment has set."""
    yield from (option_of(each.partition("=")[0]) for each in options.from_environment)


def _refuse_launch(options: Options) -> None:
    launch = found_launch(os.environ)
    if launch is not None:
        given = f"tune under {launch.launcher}"
        raise NanoConfigError(problem(given, "trials start processes of their own", "Tune in one process first"))
