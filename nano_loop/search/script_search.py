"""The search for the options of a script without a line of nano_loop: each trial executes it from its start."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import wait
from typing import IO, Any

from typing_extensions import override

from nano_loop.config.protocol import COMMAND, Command
from nano_loop.cpu.parent_process import end_with
from nano_loop.distributed.launch.reports import Frames, read_available
from nano_loop.runtime.settings import Settings
from nano_loop.search.requested import options_of_environment
from nano_loop.search.result import Tuning
from nano_loop.search.search import Search
from nano_loop.search.trial_processes import TrialFailedError, mean_without_pauses

#: What the ambient mode does not do, which is for one process.
_FIXED = ("num_processes", "cpu_for_each_process", "distributed_backend", "process_group_backend")
_INTERVAL = 0.2  # seconds between two looks at the process


def search_script(command: Sequence[str], environ: Mapping[str, str], seconds: float) -> Tuning:
    """Return the fastest options of `install` for a script.

    Parameters
    ----------
    command : sequence of str
        What runs it.
    environ : mapping
        The environment in which Python begins with `nano_loop.search.script_trial.begin_requested`.
    seconds : float
        How long the search may take, about.

    Raises
    ------
    NanoError
        If the script fails.
    """
    settings = Settings.read({})
    return _ScriptSearch(command, environ, settings, seconds).run()


class _ScriptSearch(Search):
    def __init__(self, command: Sequence[str], environ: Mapping[str, str], settings: Settings, seconds: float) -> None:
        super().__init__(None, settings, {*_FIXED, *options_of_environment(settings.options)}, seconds)
        self._command, self._environ = command, environ
        self._written = "nano_loop.install(", ")"

    @override
    def _prepare(self, stack: ExitStack) -> None:
        """Prepare nothing: the script is there."""

    @override
    def _begun(self, settings: Settings, *, is_plain: bool) -> Any:
        began = time.monotonic()
        trial = _ScriptTrial(self._command, self._environ, settings, is_plain=is_plain)
        if not self._longest:  # the first one: others take as long to begin
            with ExitStack() as failing:
                failing.callback(trial.close)
                trial.wait_for_answer(max(self._left, 60.0))
                failing.pop_all()
            self._longest = 3 * (time.monotonic() - began)
        return trial


class _ScriptTrial:
    """The process of one trial, until `close`. It begins with its first steps at once.

    Parameters
    ----------
    command, environ
        See `search_script`.
    settings : Settings
        The options of the trial.
    is_plain : bool
        Whether nothing is accelerated.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], settings: Settings, *, is_plain: bool
    ) -> None:
        self._frames = Frames()
        self._waiting: list[dict[str, Any]] = []
        self._ending = ExitStack()
        self._errors: IO[bytes] = self._ending.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        (childs_input, self._requests), (self._answers, childs_output) = os.pipe(), os.pipe()
        for descriptor in (self._requests, self._answers):
            self._ending.callback(os.close, descriptor)
        os.set_blocking(self._answers, False)
        arguments = {
            "requests": childs_input,
            "answers": childs_output,
            "is_plain": is_plain,
            "options": _as_json(settings),
        }
        self._process = subprocess.Popen(
            command,
            env={**environ, COMMAND: Command("trial", None, arguments).encoded()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=(childs_input, childs_output),
            preexec_fn=partial(end_with, os.getpid()),  # no thread runs here
        )
        self._ending.callback(self._process.wait)
        self._ending.callback(self._process.kill)
        os.close(childs_input)
        os.close(childs_output)

    def take(self, count: int, timeout: float) -> tuple[float, int]:
        """Take steps; return the seconds of one, and the memory of the process in bytes."""
        os.write(self._requests, f"{count}\n".encode())
        (answer,) = self.answers(timeout)
        return mean_without_pauses(answer["seconds"]), answer["peak"]

    def answers(self, timeout: float) -> list[dict[str, Any]]:
        """Return what the process has answered, as the only one.

        Raises
        ------
        TrialFailedError
            If it has ended, or the time is over.
        """
        self.wait_for_answer(timeout)
        return [self._waiting.pop(0)]

    def wait_for_answer(self, timeout: float) -> None:
        """Return when the process has answered."""
        deadline = time.monotonic() + timeout
        while not self._waiting:
            if time.monotonic() > deadline:
                raise TrialFailedError(f"it took more than {timeout:.0f} s")
            wait([self._answers], _INTERVAL)
            has_ended = self._process.poll() is not None
            data, _ = read_available(self._answers)
            self._waiting += (answer for answer, _ in self._frames.feed(data))
            if has_ended and not self._waiting:
                raise TrialFailedError(self._words_at_end())

    def close(self) -> None:
        """Kill the process."""
        self._ending.close()

    def _words_at_end(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        code = self._process.returncode
        return f"ended with code {code} before its first steps" + (f": {lines[-1]}" if code and lines else "")


def _as_json(settings: Settings) -> dict[str, Any]:
    """Return the options that JSON has, which a function is not."""
    values = {}
    for name, value in settings.options.as_dict().items():
        try:
            values[name] = json.loads(json.dumps(value))
        except TypeError:
            continue
    return values
