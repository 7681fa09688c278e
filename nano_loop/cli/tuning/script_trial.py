"""One trial of a script: it runs from its start, as a child, until it has taken some steps."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nano_loop.cli.script import started
from nano_loop.config.environment import variable_of


class TrialFailedError(Exception):
    """The script ended, or took too long, before it had taken its steps.

    Attributes
    ----------
    code : int or None
        The exit code of the script; None if it was ended.
    errors : str
        What it has written to standard error.
    """

    def __init__(self, words: str, code: int | None = None, errors: str = "") -> None:
        super().__init__(words)
        self.code, self.errors = code, errors


def trial_of(
    command: Sequence[str],
    environ: Mapping[str, str],
    changes: Mapping[str, Any],
    *,
    seconds: float,
    limit: float,
    is_plain: bool = False,
    compares: bool = False,
) -> dict[str, Any]:
    """Run a script until it has taken steps for some time, and return what it answers; see `cli.tuning.in_script`.

    Parameters
    ----------
    command, environ
        What runs the script, and its environment.
    changes : mapping
        Options by name, which the environment tells the script.
    seconds : float
        How long it takes steps.
    limit : float
        The seconds after which it is killed.
    is_plain : bool
        Whether nothing is accelerated.
    compares : bool
        Whether its first batch is compared with the plain model, in place of taking steps.

    Raises
    ------
    TrialFailedError
        If it fails, takes too long, or ends without a step.
    """
    own = {"seconds": seconds, "is_plain": is_plain, "compares": compares}
    environ = {**environ, **{variable_of(name): str(value) for name, value in changes.items()}}
    began = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
        with started("tune", own, command, environ, **streams) as (process, read_answer):
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                raise TrialFailedError(f"it took more than {limit:.0f} s") from None
            answer = read_answer()
        errors.seek(0)
        written = errors.read().decode(errors="replace").strip()
    if answer is not None and "error" in answer:
        raise TrialFailedError(answer["error"])
    if code or answer is None:
        last = written.splitlines()[-1:] if code else []
        raise TrialFailedError(": ".join([f"it ended with code {code}", *last]), code, written)
    return {**answer["result"], "took": time.monotonic() - began}
