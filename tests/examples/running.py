"""Runs an example as a user would, in a separate process, and reads its results from its --json file."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

OF_THE_CPU = "this CPU has no bf16 instructions"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# Makes imports of nano_loop fail.
REFUSING = """
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "nano_loop":
            raise ModuleNotFoundError("nano_loop was imported")

sys.meta_path.insert(0, Refuse())
"""
# Runs the script given as the first argument in such a Python.
WITHOUT_NANO_LOOP = f"""{REFUSING}
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def command(script, *options, nano_loop=True):
    """Return the command line that runs an example, with or without nano_loop being importable."""
    without = () if nano_loop else ("-c", WITHOUT_NANO_LOOP)
    return [sys.executable, *without, str(EXAMPLES / script), *map(str, options)]


def environment():
    """Return this process's environment without variables that override options, and with one thread.

    With small models on a busy machine, two threads would mostly wait for each other.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("NANO_LOOP_")}
    return own | {"OMP_NUM_THREADS": "1"}


def run(script, *options, nano_loop=True):
    """Run an example to its end; return the finished process, with its output as text."""
    return subprocess.run(
        command(script, *options, nano_loop=nano_loop), env=environment(), capture_output=True, text=True
    )


def kill_when_it_has_saved(file, script, *options):
    """Run an example until it has saved a checkpoint in a file, and kill it."""
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(script, *options, "--checkpoint", file), env=environment(), **output)
    try:
        while not file.exists():
            assert process.poll() is None, "it ended before it saved"
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()


def results(script, *options, folder, nano_loop=True):
    """Run an example that must succeed without a warning; return its results and its output.

    The warning about missing bf16 instructions is allowed.
    """
    file = folder / "results.json"
    process = run(script, *options, "--json", file, nano_loop=nano_loop)
    assert process.returncode == 0, process.stderr
    warned = [line for line in process.stderr.splitlines() if "Warning" in line and OF_THE_CPU not in line]
    assert not warned, process.stderr
    return json.loads(file.read_text()) | {"stdout": process.stdout, "stderr": process.stderr}
