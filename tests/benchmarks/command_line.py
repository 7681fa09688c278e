"""Runs a benchmark's command line as a user would: in a separate process."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Name prefix of a user's own workloads and systems.
OWN = "tests.benchmarks.tiny:"


def run(module, *options):
    """Run a module to its end, with one thread, and return the finished process with its output as text."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *map(str, options)]
    return subprocess.run(command, env=os.environ | own, cwd=ROOT, capture_output=True, text=True)


def results(folder, *options):
    """Run the benchmarks, which must succeed, and return their stored results and the finished process."""
    process = run("benchmarks.run", *options, "--output", folder / "kept")
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "kept.json").read_text()), process
