"""What it takes to start worker processes: the Python that they are forked from, and what each of them gets."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nano_loop.distributed.launch.external.environment import without_launch
from nano_loop.distributed.seat import Seat
from nano_loop.exports import is_exported

#: Exit code of the first process where the system refuses the second; that of a temporary failure in sysexits.h.
UNFORKED = 75
# The first process ends at once, so that what it leaves is no child of the caller's: `os.wait` in the user's program
# never meets it. Of the working folder, which -c puts first on the path, a json.py would be taken for Python's own.
# CPUs are chosen before a thread exists that would keep another mask. Nothing of what imports make is garbage: to look
# for it takes a fifth of the start. torch 2.8 makes a temporary folder when it is imported, which a killed process
# would leave behind: in the first run's own folder it goes with that.
BOOTSTRAP = """
import os, sys
try:
    if os.fork():
        os._exit(0)
except OSError:
    os._exit(@UNFORKED@)
sys.path[:] = filter(None, sys.path)
import gc, json, socket, tempfile
gc.disable()
origin = json.loads(sys.stdin.buffer.readline())
control = socket.socket(fileno=int(sys.argv[1]))
try:
    control.sendall(json.dumps({"hello": os.getpid(), "bytes": 0}).encode() + b"\\n")
except OSError:  # the caller is gone, and has left a folder
    pass
if origin["cpus"]:
    os.sched_setaffinity(0, origin["cpus"])
sys.path[:] = origin["path"]
tempfile.tempdir = origin["folder"]
from nano_loop.distributed.launch.local.fork_server import preload, serve
preload(origin["modules"], origin["folder"])
tempfile.tempdir = None
serve(control, origin["caller"], origin["idle"])
""".replace("@UNFORKED@", str(UNFORKED))
# What workers need, and what takes long to import. The caller has the first if its loop uses an optimizer, the second
# in any run, the third if it has decorated a function, and the last if its loop is that of a `TorchNano`.
ALL_MODULES = ("torch._dynamo", "nano_loop.run", "nano_loop.decorator", "nano_loop.torch_nano")
#: Variables that would put every process on the same CPUs, or stop a worker at a prompt.
NOT_FOR_WORKERS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "PYTHONINSPECT")
# They change from call to call, and nothing that Python or a library does when it starts depends on them.
# torch._dynamo sets the last when it is imported, and reads it when it compiles.
_VOLATILE = ("PYTEST_CURRENT_TEST", "OLDPWD", "PWD", "SHLVL", "_", "TORCHINDUCTOR_CACHE_DIR")
_THREADS = "OMP_NUM_THREADS"
_FLAGS = (
    ("optimize", "-O"),  # else an assert would fail on one rank alone
    ("isolated", "-I"),
    ("ignore_environment", "-E"),
    ("no_user_site", "-s"),
    ("no_site", "-S"),
    ("dont_write_bytecode", "-B"),
    ("bytes_warning", "-b"),
)


@dataclass(frozen=True)
class Origin:
    """What the process is started with that workers are forked from; for another origin it takes another process.

    Parameters
    ----------
    command : tuple of str
        The command line, up to the bootstrap: this Python with this process's options.
    environ : tuple of (str, str)
        The environment, sorted, but for what changes from call to call.
    path : tuple of str
        ``sys.path`` of the caller, absolute.
    cpus : int
        How many CPUs each worker is bound to; 0 for no binding. OpenMP counts them when it is loaded.
    limits : tuple
        The limits on resources, and the mask of new files' modes, which processes inherit.
    """

    command: tuple[str, ...]
    environ: tuple[tuple[str, str], ...]
    path: tuple[str, ...]
    cpus: int
    limits: tuple[object, ...]

    @classmethod
    def of_seat(cls, seat: Seat) -> Origin:
        """Return the origin of a seat's worker, from the caller's process as it is now."""
        steady = {name: each for name, each in environment_of(seat, os.environ).items() if name not in _VOLATILE}
        return cls(
            command=tuple(command()),
            environ=tuple(sorted(steady.items())),
            path=_path(),
            cpus=len(cpus_of(seat)),
            limits=_limits(),
        )

    def as_line(self, cpus: list[int], folder: str | None, idle: float, modules: Sequence[str] = ()) -> bytes:
        """Return what the bootstrap reads.

        Parameters
        ----------
        cpus : list of int
            Where it imports; empty for no binding.
        folder : str or None
            The temporary folder while it imports; None for the system's.
        idle : float
            Seconds without a run after which it ends.
        modules : sequence of str
            What it imports besides.
        """
        given = {"path": self.path, "cpus": cpus, "folder": folder, "caller": os.getpid(), "idle": idle}
        return json.dumps({**given, "modules": [*modules]}).encode() + b"\n"


@dataclass
class Start:
    """What one worker gets when it is forked.

    Parameters
    ----------
    rank : int
        Its rank.
    cpus : list of int
        The logical CPUs that it is bound to; empty for no binding.
    folder : str
        The folder that the ranks of the run have in common.
    argv : list of str
        ``sys.argv`` of the caller.
    environ : dict
        Its environment.
    working_folder : str or None
        The caller's; None where that has been deleted.
    verbose : bool
        Whether what it prints is shown.
    """

    rank: int
    cpus: list[int]
    folder: str
    argv: list[str]
    environ: dict[str, str]
    working_folder: str | None
    verbose: bool

    @classmethod
    def of_seat(cls, seat: Seat, verbose: bool) -> Start:
        """Return what starts the worker of a seat, from the caller's process as it is now."""
        return cls(
            rank=seat.ranks.rank,
            cpus=cpus_of(seat),
            folder=str(seat.ranks.folder),
            argv=[*map(str, sys.argv)],
            environ=environment_of(seat, os.environ),
            working_folder=working_folder(),
            verbose=verbose,
        )

    def write(self) -> str:
        """Write it to a file in the run's private folder, and return the path."""
        path = Path(self.folder) / f"start-{self.rank}"
        path.write_text(json.dumps(asdict(self)))
        return str(path)

    @classmethod
    def read(cls, path: str) -> Start:
        """Return what `write` has written, and delete the file."""
        start = cls(**json.loads(Path(path).read_text()))
        os.unlink(path)
        return start


def modules_to_import() -> list[str]:
    """Return the modules that workers will need, and that take long to import, of those that the caller has."""
    return [name for name in ALL_MODULES if name in sys.modules]


def environment_of(seat: Seat, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a seat's worker, where the caller has `environ`."""
    kept = {name: value for name, value in without_launch(environ).items() if name not in NOT_FOR_WORKERS}
    if is_exported(_THREADS, environ):  # by `nano-loop env`, for the cores of all ranks together
        del kept[_THREADS]
    defaults = {_THREADS: str(seat.machine.num_threads), "TQDM_DISABLE": "1", "PYTHONBREAKPOINT": "0"}
    return {**defaults, **kept}


def command() -> list[str]:
    """Return the command line of this Python with this process's options, and the bootstrap."""
    flags = [option for name, option in _FLAGS for _ in range(getattr(sys.flags, name))]
    settings = [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    return [sys.executable, *flags, *settings, *(f"-W{each}" for each in sys.warnoptions), "-c", BOOTSTRAP]


def cpus_of(seat: Seat) -> list[int]:
    """Return the CPUs that a seat's worker is bound to; empty for no binding."""
    return list(seat.ranks.shares[seat.ranks.local_rank]) if seat.ranks.shares else []


def _path() -> tuple[str, ...]:
    # Python skips an entry that is no string, and one in a working folder that is gone.
    entries: list[object] = [*sys.path]
    begins = working_folder()
    found = (each for each in entries if isinstance(each, str) and (begins is not None or os.path.isabs(each)))
    return tuple(map(os.path.abspath, found))


def working_folder() -> str | None:
    """Return that of this process; None where it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _limits() -> tuple[object, ...]:
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return (*(resource.getrlimit(getattr(resource, name)) for name in names), _umask())


def _umask() -> str:
    """Return the mask of new files' modes, which can be asked for without setting it on Linux alone."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return ""
    return status.partition("Umask:")[2].partition("\n")[0].strip()
