"""Faults: memory, files, processes and room that run out, and folders that are deleted."""

import contextlib
import ctypes
import os
import resource
import shutil
import subprocess
from pathlib import Path

import torch

from faults.fault import BEFORE, EPOCH, STARTING, Fault
from faults.runs import OPTIONS, at, attribute, train
from nano_loop import NanoError, nano
from nano_loop.distributed.comm import limits
from nano_loop.distributed.launch import shared_folder
from nano_loop.distributed.launch_local import kept_server as servers

_PR_CAPBSET_DROP, _CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 24, 21, 24  # from linux/prctl.h and capability.h
_DATA = 1 << 20  # numbers of four bytes


@contextlib.contextmanager
def _limit(name, value):
    number = getattr(resource, name)
    before = resource.getrlimit(number)
    resource.setrlimit(number, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(number, before)


@contextlib.contextmanager
def _small_folder(options):
    """Give a place for shared memory that has little room."""
    folder = Path(os.environ["TMPDIR"]) / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        with attribute(shared_folder, "SHARED_MEMORY", folder), attribute(limits, "SHARED_MEMORY", folder):
            yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def _sent():
    def sums(model, data):
        return data.sum().item()

    return nano(**OPTIONS)(sums)(torch.nn.Linear(1, 1), torch.ones(_DATA))


def _no_room():
    with _small_folder("size=2m"):
        _sent()


def _no_inodes():
    with _small_folder("nr_inodes=4") as folder:
        files = [folder / str(number) for number in range(3)]
        for file in files:
            file.touch()
        try:
            _sent()
        finally:
            for file in files:
                file.unlink()


def _small_files():
    with _limit("RLIMIT_FSIZE", 1 << 20):
        _sent()


def _few_descriptors(more):
    def commit():
        train()
        servers.end_kept()
        with _limit("RLIMIT_NOFILE", max(map(int, os.listdir("/proc/self/fd"))) + more):
            train()

    return commit


def _little_memory():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.ones(1 << 33)


def _bytes_of_python():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, resource.getrlimit(resource.RLIMIT_AS)[1]))
    bytearray(1 << 35)


def _delete_folder():
    (folder,) = Path("/dev/shm").glob(f"nano_loop-{os.getpid()}-*")
    shutil.rmtree(folder)


def _few_processes():
    """Have the kernel refuse a fork, which it does not where root asks: so as another user, with root's files."""
    library = ctypes.CDLL(None)
    for capability in (_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE):
        library.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setresuid(65534, 0, 0)
    with _limit("RLIMIT_NPROC", 1):
        train()


FAULTS = [
    Fault(
        "the shared-memory folder has no room for the arguments",
        BEFORE,
        _no_room,
        words=("4,194,304 bytes", "has 2,097,152 bytes", "Enlarge it (docker run --shm-size", "share_memory_()"),
        rank=0,
        as_root=True,
        quick=True,
    ),
    Fault(
        "the shared-memory folder has no inodes",
        BEFORE,
        _no_inodes,
        NanoError,
        ("all 4 inodes of the file system", "are in use", "Delete files there"),
        as_root=True,
    ),
    Fault(
        "files may not be as large as the arguments (ulimit -f)",
        BEFORE,
        _small_files,
        words=("4,194,304 bytes", "no file of this process may have more than 1,048,576 bytes", "ulimit -f"),
        rank=0,
        begins=True,
    ),
    *(
        Fault(
            f"descriptors are used up but for {more} (ulimit -n)",
            STARTING,
            _few_descriptors(more),
            NanoError,
            ("Too many open files", "files and pipes at a time", "Close some, or raise the limit (ulimit -n)"),
            apart=True,
            begins=True,
        )
        for more in (2, 3, 4)  # of the folder, the socket pair and the pipes
    ),
    Fault(
        "a worker may have no more memory, and torch asks for it (ulimit -v)",
        EPOCH,
        at(1, 3, _little_memory),
        words=("rank 1 raised RuntimeError", "memory"),
        rank=1,
    ),
    Fault(
        "a worker may have no more memory, and Python asks for it (ulimit -v)",
        EPOCH,
        at(1, 3, _bytes_of_python),
        words=("rank 1 raised MemoryError",),
        rank=1,
        cause=MemoryError,
    ),
    Fault("the private folder of a run is deleted", EPOCH, at(0, 3, _delete_folder), None),
    Fault(
        "this user may have no more processes (ulimit -u)",
        STARTING,
        _few_processes,
        words=("rank 1 could not be started (Resource temporarily unavailable)", "ulimit -u"),
        rank=1,
        apart=True,
        as_root=True,
        begins=True,
    ),
]
