"""Run each job in a separate, fresh process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Job = dict[str, Any]
Result = dict[str, Any]


def fresh(
    job: Job,
    *,
    limit: float,
    python: str = sys.executable,
    settings: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "benchmarks.case"),
) -> Result:
    """Run a job in a fresh process.

    Parameters
    ----------
    job : dict
        The job.
    limit : float
        Time limit in seconds, after which the process and its children are ended.
    python : str
        The Python that runs it.
    settings : mapping, optional
        Environment variables in addition to this process's.
    program : sequence of str
        The program, which gets the job as JSON, and prints one line of JSON.

    Returns
    -------
    dict
        The measurement, or the ``reason`` why there is none.
    """
    command = [python, *program, json.dumps(job)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with tempfile.TemporaryDirectory() as folder:  # it may be killed, and leave files behind
        own = environment() | {"TMPDIR": folder} | dict(settings or {})
        process = subprocess.Popen(command, env=own, start_new_session=True, **pipes)
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return {"reason": too_long(limit)}
        finally:
            _end(process)
    return json.loads(out) if out else {"reason": died(process.returncode, err)}


def environment() -> dict[str, str]:
    """Return this process's environment, extended so that another process can import the benchmarks."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def too_long(limit: float) -> str:
    return f"it took more than {limit:g} s"


def died(code: int, err: str) -> str:
    """Describe the end of a process without a result: its exit code or signal, and the last line it wrote."""
    how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    return ": ".join([how, *err.strip().splitlines()[-1:]])


def keep_output() -> Any:
    """Redirect all output to standard error from now on, and return the real standard output."""
    sys.stdout.flush()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and its children if they still run, and read the rest of its pipes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
