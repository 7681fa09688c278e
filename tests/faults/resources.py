"""Faults: memory, files, processes and disk space are exhausted, and folders are deleted."""

import contextlib
import ctypes
import os
import resource
import shutil
import subprocess
from pathlib import Path

import torch

from faults.fault import Fault
from faults.runs import OPTIONS, at, attribute, python, temporary, train
from nano_loop import NanoError, nano
from nano_loop.distributed.comm import system_limits
from nano_loop.distributed.launch import shared_folder
from nano_loop.distributed.launch_local import server as servers

_PR_CAPBSET_DROP, _CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 24, 21, 24  # from linux/prctl.h and capability.h
_CAPS_OF_FILES = (1, 2)  # with these, root opens files without permission
_DATA = 1 << 20  # elements of four bytes


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
def _small_folder(options, shared_memory=None):
    """Yield a folder with little space, used as shared memory unless `shared_memory` is given."""
    folder = Path(os.environ["TMPDIR"]) / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        place = shared_memory or folder
        with attribute(shared_folder, "SHARED_MEMORY", place), attribute(system_limits, "SHARED_MEMORY", place):
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


def _as_another_user(*capabilities):
    """Make the kernel refuse operations that root may do: switch to another user, with root's files."""
    library = ctypes.CDLL(None)
    for capability in capabilities:
        library.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setresuid(100_000 + os.getpid(), 0, 0)


def _few_processes():
    _as_another_user(_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE)
    with _limit("RLIMIT_NPROC", 1):
        train()


def _named(act, words):
    """Call a function that may succeed, or raise an error with these words."""
    try:
        act()
    except NanoError as error:
        seen = str(error)
    else:
        return
    assert words in seen, seen
    assert "pickled" not in seen, seen


def _few_inodes(shared_memory):
    """Train with a few inodes; each limit fails at a different point."""

    def commit():
        for inodes in range(1, 13, 2):
            with _small_folder(f"nr_inodes={inodes},mode=1777", shared_memory) as folder, temporary(folder):
                _named(_sent, "inodes")

    return commit


def _few_more_processes():
    """Allow a few more processes and threads than exist, and train; each limit fails at a different point."""
    _as_another_user(_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE)
    for more in range(1, 7):
        with _limit("RLIMIT_NPROC", len(os.listdir("/proc/self/task")) + more):
            _named(train, "ulimit -u")


def _closed_umask():
    def without_rights_of_root():
        for capability in _CAPS_OF_FILES:
            ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)

    program = """
    os.umask(0o777)
    try:
        nano(**small.OPTIONS)(lambda model: 1)(torch.nn.Linear(1, 1))
    except NanoError as error:
        print(error)
    """
    said = python(program, preexec_fn=without_rights_of_root)
    assert "has the mode d---------, because of the umask" in said, said
    assert "Set umask 022" in said, said


FAULTS = [
    Fault("the shared-memory folder has no room for the arguments", _no_room, as_root=True, quick=True),
    Fault("the shared-memory folder has no inodes", _no_inodes, as_root=True),
    *(
        Fault(
            f"the folder for temporary files has one to eleven inodes, and {what}",
            _few_inodes(place),
            as_root=True,
            seconds=60,
        )
        for what, place in (("/dev/shm has room", Path("/dev/shm")), ("there is no /dev/shm", Path("/nowhere")))
    ),
    Fault("files may not be as large as the arguments (ulimit -f)", _small_files, begins=True),
    *(
        Fault(f"only {more} descriptors are left (ulimit -n)", _few_descriptors(more), apart=True, begins=True)
        for more in (2, 3, 4)  # for the folder, the socket pair and the pipes
    ),
    Fault("a worker has reached its memory limit, and torch allocates (ulimit -v)", at(1, 3, _little_memory)),
    Fault("a worker has reached its memory limit, and Python allocates (ulimit -v)", at(1, 3, _bytes_of_python)),
    Fault("the private folder of a run is deleted", at(0, 3, _delete_folder)),
    Fault(
        "this user has reached the limit of processes (ulimit -u)",
        _few_processes,
        apart=True,
        as_root=True,
        begins=True,
    ),
    Fault(
        "this user may have one to six more processes and threads (ulimit -u)",
        _few_more_processes,
        apart=True,
        as_root=True,
        seconds=60,
    ),
    Fault("the umask takes the user's own rights away (umask 0777)", _closed_umask, as_root=True, begins=True),
]
