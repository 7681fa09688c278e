"""Runs the script of a search with the options of one candidate, and reads the answer that it writes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

from nano_loop.cli.script import Script, started
from nano_loop.cli.tuning.candidates import Changes
from nano_loop.config.environment import variable_of
from nano_loop.errors import quoted

#: Seconds: the time limit of the first run, and the interval between messages.
_FIRST, _QUIET = 600.0, 10


class TrialFailedError(Exception):
    """The script ended with a `code`, or timed out (None), before it had taken its steps."""

    def __init__(self, words: str, code: int | None = None, errors: str = "") -> None:
        super().__init__(words)
        self.code, self.errors = code, errors


class Trials:
    """Runs of a script, each in a new process, with a time limit; `environ` has no candidate's options."""

    def __init__(self, script: Script) -> None:
        self.environ = {**os.environ, **script.variables}
        self.limit = _FIRST
        self._command = script.command

    def answer(
        self, changes: Changes, *, seconds: float, is_plain: bool = False, compares: bool = False
    ) -> dict[str, Any]:
        """Run the script, with changed options, for some seconds of steps, and return its answer; see `in_script`.

        With `is_plain`, it runs without nano_loop. With `compares`, it compares its first batch with the plain model
        instead. Raises a `TrialFailedError` if the script fails, times out, or ends without a step.
        """
        own = {"seconds": seconds, "is_plain": is_plain, "installs": not is_plain, "compares": compares}
        texts = {variable_of(name): str(value) for name, value in {**changes, "verbose": False}.items()}
        with tempfile.TemporaryFile() as errors:
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
            began = time.monotonic()
            with started("tune", own, self._command, {**self.environ, **texts}, **streams) as (process, read):
                code = self._exit_code(process)
                answer = read()
            errors.seek(0)
            written = errors.read().decode(errors="replace").strip()
        if answer is not None and "error" in answer:
            raise TrialFailedError(answer["error"])
        if code or answer is None:
            last = [quoted(line) for line in written.splitlines()[-1:]] if code else []
            raise TrialFailedError(": ".join([f"it ended with code {code}", *last]), code, written)
        return {**answer["result"], "took": time.monotonic() - began}

    def _exit_code(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a script, and print a message from time to time."""
        for waited in range(0, math.ceil(self.limit), _QUIET):
            if waited:
                say(f"it has run for {waited} s")
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_QUIET)
        raise TrialFailedError(f"it took more than {self.limit:.0f} s")


def say(what: str) -> None:
    """Print a message about the search on standard error."""
    print(f"tune: {what}", file=sys.stderr, flush=True)
