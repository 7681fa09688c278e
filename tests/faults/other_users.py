"""Faults: other users of the host replace files of this user's processes."""

import contextlib
import functools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from kernels.conftest import forget_libraries

from faults.fault import Fault
from faults.runs import attribute, environ, temporary, train
from nano_loop.distributed.launch import shared_folder
from nano_loop.kernels import build

_OTHER = 65534


@contextlib.contextmanager
def _open_to_all():
    """Yield a folder writable by every user, without the sticky bit, and a path that exists after an attack."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    mark = folder / "attacked"
    try:
        yield folder, str(mark)
        assert not mark.exists(), "code of another user was run"
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _other_user(act):
    """Let a process of another user call `act` repeatedly."""
    process = os.fork()
    if process == 0:
        os.setgid(_OTHER)
        os.setuid(_OTHER)
        while os.getppid() != 1:
            with contextlib.suppress(OSError):
                act()
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


class _Attack:
    """Records, when unpickled, that another user's code has run."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def _put_payload(folder, mark):
    """Replace the folder of each run by one with a payload."""
    for run in folder.glob("nano_loop-*"):
        if run.owner() != "nobody":
            run.rename(folder / f"gone-{os.urandom(4).hex()}")
            run.mkdir()
            run.chmod(0o777)
            (run / "files").symlink_to(folder)
        sent = run / "payload"
        if (sent / "payload").exists() and sent.owner() != "nobody":
            sent.rename(run / "gone")
            sent.mkdir()
            (sent / "payload").write_bytes(pickle.dumps(_Attack(mark)))


def _replaced_run():
    with (
        _open_to_all() as (folder, mark),
        temporary(folder),
        attribute(shared_folder, "SHARED_MEMORY", Path("/nowhere")),
    ):
        try:
            with _other_user(functools.partial(_put_payload, folder, mark)):
                train()
        finally:
            assert not os.path.exists(mark), "code of another user was run"


_LIBRARY = """
#include <sys/stat.h>
__attribute__((constructor)) static void attack(void) { mkdir("%s", 0777); }
"""


def _replaced_library(cache):
    """Replace the folder of a library, as another user, just before it is loaded."""

    def commit():
        with _open_to_all() as (folder, mark), temporary(folder):
            (folder / "attack.c").write_text(_LIBRARY % mark)
            subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "attack.so", folder / "attack.c"], check=True)
            library = (folder / "attack.so").read_bytes()
            attacking = True

            def attack(event, arguments):
                nonlocal attacking
                path = Path(arguments[0]) if attacking and event == "ctypes.dlopen" and arguments[0] else folder
                if folder not in path.parent.parents:
                    return
                attacking = False
                os.seteuid(_OTHER)
                path.parent.rename(folder / "gone")
                path.parent.mkdir()
                path.write_bytes(library)
                os.seteuid(0)

            place = str(folder / cache) if cache else "/proc/nowhere"
            with environ(XDG_CACHE_HOME=place, NANO_LOOP_KERNELS="compile"):
                forget_libraries()
                sys.addaudithook(attack)
                try:
                    for _ in range(2):
                        with contextlib.suppress(build.UnavailableError):
                            build.compiled("bernoulli", False)
                        forget_libraries()
                finally:
                    attacking = False

    return commit


FAULTS = [
    Fault(
        "another user can replace the folder of a run, in a TMPDIR without the sticky bit, and there is no /dev/shm",
        _replaced_run,
        as_root=True,
        quick=True,
        begins=True,
    ),
    *(
        Fault(
            f"another user replaces the folder of a compiled kernel before it is loaded, {place}",
            _replaced_library(cache),
            apart=True,
            as_root=True,
        )
        for place, cache in (("in a folder for caches that all can write to", "."), ("in such a TMPDIR", None))
    ),
]
