"""Run each job in a fork of one process that has imported everything: for --quick, since a start takes three seconds.

`forks` starts that process, ``python -m benchmarks.forks``, and sends it jobs as lines of JSON. It computes nothing
itself, since a fork has only one thread: of a thread pool, it would inherit only the locks.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from benchmarks.case import perform
from benchmarks.fresh import Job, Result, died, environment, keep_output, too_long

#: The imports of the workloads and systems; missing ones fail when they are used.
MODULES = (
    "PIL.Image",
    "PIL.JpegImagePlugin",
    "accelerate",
    "lightning_fabric",
    "nano_loop",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.vit.modeling_vit",
)


@contextmanager
def forks() -> Iterator[Callable[..., Result]]:
    """Start the process, and yield a function that runs a job in a fork of it, like `fresh` in a new process."""
    settings = {"OPENBLAS_NUM_THREADS": "1"}  # numpy's OpenBLAS would start its threads when it is imported
    command = [sys.executable, "-m", "benchmarks.forks"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=environment() | settings, stderr=errors, **pipes) as process,
    ):
        yield partial(_ask, process, errors)


def _ask(process: subprocess.Popen[str], errors: TextIO, job: Job, *, limit: float) -> Result:
    request = json.dumps({"job": job, "limit": limit}) + "\n"
    with suppress(BrokenPipeError):  # if it has died, see below; unbuffered, since closing would write again
        os.write(process.stdin.fileno(), request.encode())
    answer = process.stdout.readline()
    if answer:
        return json.loads(answer)
    code = process.wait()
    errors.seek(0)
    return {"reason": died(code, errors.read())}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Run jobs until there are no more."""
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    tasks = Path("/proc/self/task")
    if tasks.exists() and len(list(tasks.iterdir())) > 1:
        raise RuntimeError("an import has started threads, which a fork would not have")
    for line in requests:
        request = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            result = fork(request["job"], request["limit"], folder)
        print(json.dumps(result), file=answers, flush=True)


def fork(job: Job, limit: float, folder: str) -> Result:
    """Run a job in a fork of this process, with a time limit in seconds and a folder for its files."""
    sys.stderr.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        tempfile.tempdir = folder
        _child(job, writer)
    os.close(writer)
    with open(reader) as answer:
        in_time = bool(select.select([answer], [], [], limit)[0])
        if not in_time:
            os.kill(pid, signal.SIGKILL)
        text = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not in_time:
        return {"reason": too_long(limit)}
    return json.loads(text) if text else {"reason": died(code, "")}


def _child(job: Job, writer: int) -> None:
    """Run the job and exit immediately, without the parent's clean-up."""
    code = 1
    try:
        with open(writer, "w") as answer:
            answer.write(json.dumps(perform(job)))
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve(sys.stdin, keep_output())
