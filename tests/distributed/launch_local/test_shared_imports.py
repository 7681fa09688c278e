"""Modules that take time to import are imported once for the workers of all calls, where a fork is as good as that."""

import importlib
import os
import signal
import sys
import threading
import time
import zipfile

import psutil
import pytest
from torch import nn

from distributed import small
from distributed.conftest import importers
from nano_loop import NanoWorkerError, broadcast, nano
from nano_loop.distributed.launch_local import kept_server as servers

pytestmark = pytest.mark.usefixtures("nothing_left")
# Not in the caller's process, where it would stay.
SOURCE = """
import os, sys
PROCESS = sys.process_of_imports = os.getpid()  # workers take over what a module has, and not this

class Thing:
    pass

if PROCESS != {caller}:
    {statement}
"""


def write(folder, name, statement="pass"):
    (folder / f"{name}.py").write_text(SOURCE.format(caller=os.getpid(), statement=statement))
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that this process and its workers import from: another would take another process to fork them."""
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(sys, "dont_write_bytecode", True)
        yield folder


@pytest.fixture
def project(folder):
    """The same, empty."""
    yield folder
    for file in folder.iterdir():
        file.unlink()
    for name in [name for name, module in sys.modules.items() if hasattr(module, "PROCESS")]:
        del sys.modules[name]


def thing_of(name):
    return importlib.import_module(name).Thing()


def used(*things, **options):
    """Use things in a run of two processes; return which process has imported their modules for the worker.

    That is the process which the worker was forked from, or None if the worker has imported by itself.
    """

    @nano(**small.OPTIONS | options)
    def train(model, things):
        imported = {sys.process_of_imports for thing in things}
        return broadcast((imported, os.getpid(), os.getppid()), 1)

    imported, own, parent = train(nn.Linear(1, 1), things)
    assert imported in ({own}, {parent})
    return parent if imported == {parent} else None


def test_modules_are_imported_once_until_a_call_needs_others(project, monkeypatch):
    write(project, "first")
    write(project, "second", "import first; Thing.base = first.Thing")
    first = used(thing_of("first"))
    assert first is not None
    assert used(thing_of("first")) == first
    assert importers() == {first}
    both = used(thing_of("second"), thing_of("first"))
    assert both not in (None, first)
    assert [used(thing_of(name)) for name in ("first", "second")] == [both, both], "one that has more than is needed"
    wait_for_importers(both)  # the first has ended
    monkeypatch.setattr(sys, "argv", ["another.py"])
    other = used(thing_of("first"))
    assert other not in (None, both), "an import may read the arguments"
    server = servers.kept()[0].pid
    servers.end_kept()
    wait_until(lambda: not [pid for pid in (server, other) if is_there(pid)])


def wait_for_importers(*pids):
    """Wait until these and no others are there."""
    wait_until(lambda: importers() == {*pids})


def wait_until(is_so):
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, importers()
        time.sleep(0.01)


def is_there(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


LEFT = {
    "thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "child": "import subprocess; child = subprocess.Popen(['sleep', '60'])",
    "ended child": "if os.fork() == 0: os._exit(0)",
    "open file": "file = open(__file__)",
    "shared memory": "import mmap; memory = mmap.mmap(-1, 8)",
    "lock of processes": "import multiprocessing; lock = multiprocessing.Lock()",
    "value of processes": "import multiprocessing; value = multiprocessing.Value('i')",
    "generator of numpy": "import numpy; generator = numpy.random.default_rng()",
    "generator of torch": "import torch; generator = torch.Generator()",
    "file": "open('written', 'w').close()",
    "temporary file": "import tempfile; place = tempfile.mkdtemp()",
}


QUICK = ("thread", "open file")
LEFT_BY_IMPORTS = [
    pytest.param(text, id=kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind, text in LEFT.items()
]


@pytest.mark.parametrize("statement", LEFT_BY_IMPORTS)
def test_what_an_import_leaves_is_the_own_of_each_worker(project, monkeypatch, statement):
    monkeypatch.chdir(project)
    write(project, "leaves", statement)
    assert [used(thing_of("leaves")) for _ in range(2)] == [None, None]
    wait_for_importers()


@pytest.mark.slow
def test_module_in_an_archive_is_imported_by_each_worker(project, monkeypatch):
    write(project, "archived")
    with zipfile.ZipFile(project / "archive.zip", "w") as archive:
        archive.write(project / "archived.py", "archived.py")
    (project / "archived.py").unlink()
    monkeypatch.syspath_prepend(project / "archive.zip")  # which takes another process to fork from
    assert used(thing_of("archived")) is None


@pytest.mark.slow
def test_linear_algebra_at_import_is_no_hindrance(project):
    """OpenBLAS ends its threads before a fork."""
    write(project, "algebra", "import numpy; size = numpy.linalg.inv(numpy.eye(500) + 1).sum()")
    assert used(thing_of("algebra")) is not None


def edit(project, name, text):
    (project / name).write_text(text)
    os.utime(project / name, ns=(1, 1))  # an edit may keep the time


@pytest.mark.parametrize("edited", ["changing.py", "deeper.py", "settings.txt"])
def test_module_is_imported_anew_when_what_it_is_made_of_has_changed(project, edited):
    write(project, "deeper")
    (project / "settings.txt").write_text("1")
    write(project, "changing", f"import deeper; rate = open({str(project / 'settings.txt')!r}).read()")
    first = used(thing_of("changing"))
    assert used(thing_of("changing")) == first != None  # noqa: E711
    edit(project, edited, (project / edited).read_text() + "\n")
    for name in ("deeper", "changing"):
        importlib.reload(importlib.import_module(name))
    assert used(thing_of("changing")) not in (None, first)


@pytest.mark.slow
def test_worker_init_comes_before_imports(project):
    write(project, "patched", "assert os.initialized")
    thing, other = thing_of("patched"), setattr
    assert used(thing, worker_init=lambda: other(os, "initialized", True)) is None


@pytest.mark.slow
def test_parent_of_workers_may_be_killed_or_stopped_between_two_calls(project):
    write(project, "first")
    before = used(thing_of("first"))
    for number in (signal.SIGKILL, signal.SIGSTOP):
        os.kill(before, number)
        time.sleep(0.1)
        after = used(thing_of("first"))
        assert after not in (None, before)
        before = after


@pytest.mark.slow
def test_parent_of_workers_that_is_killed_in_a_run_is_named(project):
    write(project, "first")

    @nano(**small.OPTIONS)
    def train(model, thing):
        if small.rank() == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        threading.Event().wait(3)

    with pytest.raises(NanoWorkerError, match="rank 1 ended with the process that it was forked from") as caught:
        train(nn.Linear(1, 1), thing_of("first"))
    assert caught.value.rank == 1
    assert used(thing_of("first")) is not None


FAILING = {
    "raises": ("raise LookupError('no such file')", 60, "rank 1 raised LookupError: no such file"),
    "exits": ("os._exit(9)", 60, "rank 1 ended its process with exit code 9"),
    "crashes": ("os.kill(PROCESS, 11)", 60, "rank 1 crashed with SIGSEGV"),
    "hangs": ("import time; time.sleep(60)", 2, "rank 1 did not start within 2 s"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("statement", "timeout", "words"), FAILING.values(), ids=FAILING)
def test_import_that_fails_is_the_failure_of_the_worker(project, statement, timeout, words):
    write(project, "first")
    write(project, "failing", statement)
    used(thing_of("first"))
    with pytest.raises(NanoWorkerError, match=words) as caught:
        used(thing_of("failing"), timeout=timeout)
    assert caught.value.rank == 1
    assert "failing.py" in (caught.value.traceback or "failing.py")


@pytest.mark.slow
def test_ctrl_c_while_modules_are_imported_ends_that(project, tmp_path):
    write(project, "slow", f"open('/dev/shm/nano_loop_test_{os.getpid()}', 'w').close(); import time; time.sleep(60)")
    begun = f"/dev/shm/nano_loop_test_{os.getpid()}"
    interrupting = threading.Thread(target=interrupt_when, args=(begun,))
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            used(thing_of("slow"))
    finally:
        interrupting.join()
        os.unlink(begun)
    wait_for_importers()
    write(project, "slow")
    importlib.reload(sys.modules["slow"])
    assert used(thing_of("slow")) is not None


def interrupt_when(file):
    deadline = time.monotonic() + 30
    while not os.path.exists(file) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
