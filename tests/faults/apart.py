"""Commit a fault in a dedicated process, because the fault may end it or change it permanently."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from faults.runs import ROOT

_LIMIT = 100.0  # seconds in total


def verdict_apart(fault, folder):
    """Commit `fault` in a new Python process, with files in `folder`; return the result of `faults.verdict.verdict`."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    temporary, answer = folder / "temporary", folder / "verdict"
    temporary.mkdir()
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TMPDIR": str(temporary)}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "faults.apart", fault.name, str(answer)],
            env=variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = f"nothing within {_LIMIT:g} s, {process.wait()}"
    if answer.exists():
        return json.loads(answer.read_text())
    return [f"the process ended with {code}:\n{(folder / 'err').read_text(errors='replace')[-4000:]}"]


if __name__ == "__main__":
    from faults.table import FAULTS
    from faults.verdict import verdict

    name, answer = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = verdict(next(fault for fault in FAULTS if fault.name == name))
    Path(answer).write_text(json.dumps(found))
