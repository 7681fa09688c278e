"""Processes that form one process group and run functions together, for tests of communication between ranks.

They start once, because each needs seconds to import torch. A team is not reused after a test has broken it.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle
import torch
from torch import distributed

from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.shared_memory.shared_channel import SharedChannel

TESTS = Path(__file__).parents[1]
START = "from distributed.team import serve; serve({fd}, {rank}, {size}, {store!r})"
TIMEOUT = 60.0  # seconds that a rank waits for another one


class Team:
    """`size` processes of one thread each, connected by a shared-memory channel and a gloo group."""

    def __init__(self, size):
        self.size = size
        self.broken = False
        self._folder = tempfile.TemporaryDirectory()
        self._processes, self._pipes = [], []
        for rank in range(size):
            self._start(rank)

    def __call__(self, function, *args):
        """Call ``function(ranks, *args)`` in every process, and return the results by rank.

        All processes get the same `args`. Raises an AssertionError with the traceback of each rank that raised.
        """
        call = cloudpickle.dumps((function, args))
        self.broken = True  # until all answer: after an interrupt, the next call would read these answers
        for pipe in self._pipes:
            pipe.send_bytes(call)
        answers = [self._answer(rank) for rank in range(self.size)]
        self.broken = any(failed for failed, _ in answers)
        if self.broken:
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, (bad, text) in enumerate(answers) if bad))
        return [result for _, result in answers]

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _start(self, rank):
        mine, theirs = os.pipe(), os.pipe()
        start = START.format(fd=(mine[0], theirs[1]), rank=rank, size=self.size, store=f"{self._folder.name}/store")
        environment = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", start]
        fds = mine[0], theirs[1]
        self._processes.append(subprocess.Popen(command, pass_fds=fds, env=environment, cwd=TESTS.parent))
        os.close(mine[0])
        os.close(theirs[1])
        self._pipes.append(_Pipe(theirs[0], mine[1]))

    def _answer(self, rank):
        try:
            return cloudpickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError) as error:
            return True, f"is gone ({type(error).__name__}), exit code {self._processes[rank].poll()}"


class _Pipe:
    def __init__(self, reading, writing):
        self._reading, self._writing = Connection(reading, writable=False), Connection(writing, readable=False)
        self.recv_bytes, self.send_bytes = self._reading.recv_bytes, self._writing.send_bytes

    def close(self):
        self._reading.close()
        self._writing.close()


def serve(fds, rank, size, store):
    torch.set_num_threads(1)
    pipe = _Pipe(*fds)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    folder = Path(store).parent
    channel = SharedChannel(_ranks(rank, size, folder), folder)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send_bytes(_run(pipe.recv_bytes(), _ranks(rank, size, folder), channel))
    distributed.destroy_process_group()


def _ranks(rank, size, folder):
    return Ranks(rank, size, local_rank=rank, local_size=size, timeout=TIMEOUT, folder=folder)


def _run(call, ranks, channel):
    ranks.channel = channel
    try:
        function, args = cloudpickle.loads(call)
        return cloudpickle.dumps((False, function(ranks, *args)))
    except Exception:
        return cloudpickle.dumps((True, traceback.format_exc()))
