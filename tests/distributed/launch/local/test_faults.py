"""Whatever becomes of a rank, the run ends soon with an error that names it, and nothing is left behind."""

import contextlib
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from distributed import small
from nano_loop import NanoError, NanoWorkerError, TorchNano, nano

pytestmark = pytest.mark.usefixtures("nothing_left")

SOON = 10.0  # seconds from a fault to its error


def run(each_step=lambda rank, step: None, **options):
    model, optimizer, loader = small.parts()
    return nano(**small.OPTIONS | options)(small.fit)(model, optimizer, loader, each_step)


@contextlib.contextmanager
def raises(kind, **attributes):
    """Expect an error of `kind` with these attributes, soon after the fault, whose time goes into `when`."""
    with pytest.raises(kind) as caught:
        yield caught
    for name, value in attributes.items():
        assert getattr(caught.value, name) == value, f"{name} of {caught.value}"


def on(failing_rank, failing_step, do):
    """A function for each step that does something on one rank, and notes the time in a file that ranks share."""

    def each_step(rank, step):
        if (rank, step) == (failing_rank, failing_step):
            do()

    return each_step


@pytest.fixture
def clock(tmp_path):
    """Note when a fault happens, in whichever process, and check how long ago that was."""
    file = tmp_path / "when"

    class Clock:
        def around(self, do):
            def noted():
                file.write_text(str(time.time()))
                do()

            return noted

        def check(self):
            assert time.time() - float(file.read_text()) < SOON

    return Clock()


# The first, one in the midst of an epoch, the last.
@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(7, marks=pytest.mark.slow)])
def test_exception_in_a_worker_is_raised_with_its_traceback(clock, step):
    def fail():
        raise ValueError("a bad batch")

    with raises(NanoWorkerError, rank=1) as caught:
        run(on(1, step, clock.around(fail)))
    clock.check()
    assert "rank 1 raised ValueError: a bad batch" in str(caught.value)
    assert "in fail" in caught.value.traceback
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(7, marks=pytest.mark.slow)])
def test_exception_of_rank_0_is_the_user_s_own(clock, step):
    class MineError(Exception):
        pass

    def fail():
        raise MineError

    with pytest.raises(MineError):
        run(on(0, step, clock.around(fail)))
    clock.check()


def test_same_exception_on_every_rank_is_the_user_s_own():
    def each_step(rank, step):
        raise KeyError("everywhere")

    with pytest.raises(KeyError, match="everywhere"):
        run(each_step)


def test_exception_that_cannot_be_pickled_is_told_all_the_same():
    class StubbornError(Exception):
        def __reduce__(self):
            raise TypeError("never")

    def fail():
        raise StubbornError("as it is")

    with raises(NanoWorkerError, rank=1) as caught:
        run(on(1, 2, fail))
    assert "StubbornError: as it is" in str(caught.value)


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "memory"), (signal.SIGSEGV, "SIGSEGV")])
def test_killed_worker_is_named_with_its_signal(clock, number, words):
    with raises(NanoWorkerError, rank=1, exitcode=-number) as caught:
        run(on(1, 3, clock.around(lambda: os.kill(os.getpid(), number))))
    clock.check()
    assert number.name in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("code", [0, pytest.param(3, marks=pytest.mark.slow)])  # 0 looks as if all were well
@pytest.mark.parametrize(("leave", "words"), [(sys.exit, "sys.exit({})"), (os._exit, "exit code {}")])
def test_worker_that_leaves_is_named_with_its_way_and_its_code(clock, leave, words, code):
    with raises(NanoWorkerError, rank=1, exitcode=code) as caught:
        run(on(1, 3, clock.around(lambda: leave(code))))
    clock.check()
    assert words.format(code) in str(caught.value)


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_sys_exit_of_rank_0_leaves_the_caller_as_it_would(clock, code):
    with pytest.raises(SystemExit) as caught:
        run(on(0, 3, clock.around(lambda: sys.exit(code))))
    clock.check()
    assert caught.value.code == code


def test_sys_exit_of_every_rank_leaves_the_caller_as_it_would():
    def each_step(rank, step):
        sys.exit(4)

    with pytest.raises(SystemExit) as caught:
        run(each_step)
    assert caught.value.code == 4


@pytest.mark.parametrize("leaving", [0, 1])
def test_rank_that_takes_fewer_steps_is_named(clock, leaving):
    def train(model, optimizer, loader):
        for step, (x, y) in enumerate(loader):
            if (small.rank(), step) == (leaving, 2):
                clock.around(lambda: None)()
                return
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    with raises(NanoWorkerError) as caught:
        nano(**small.OPTIONS)(train)(*small.parts())
    clock.check()
    assert f"rank {leaving} has returned from train" in str(caught.value)
    assert "same number of steps" in str(caught.value)


def test_rank_that_skips_a_collective_of_the_loop_is_named(clock):
    def train(model):
        if small.rank() == 1:
            clock.around(lambda: None)()
            return
        distributed.all_reduce(torch.ones(1))

    with raises(NanoWorkerError, rank=1):
        nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1))
    clock.check()


def test_learning_rates_that_differ_are_told(clock):
    def train(model, optimizer, loader):
        if small.rank() == 1:
            clock.around(lambda: None)()
            optimizer.param_groups[0]["lr"] = 0.05
        small.fit(model, optimizer, loader)

    with raises(NanoWorkerError) as caught:
        nano(**small.OPTIONS)(train)(*small.parts())
    clock.check()
    assert "0.05" in str(caught.value)
    assert "0.1" in str(caught.value)


def test_ctrl_c_ends_a_wait_for_another_rank(clock):
    def interrupt():
        main = threading.main_thread().ident
        threading.Timer(0.5, clock.around(lambda: signal.pthread_kill(main, signal.SIGINT))).start()

    def each_step(rank, step):
        if (rank, step) == (1, 3):
            time.sleep(60)  # rank 0 waits for its gradients
        if (rank, step) == (0, 3):
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        run(each_step)
    clock.check()


def test_ctrl_c_ends_a_wait_inside_torch(clock):
    def train(model):
        if small.rank() == 1:
            time.sleep(60)
        main = threading.main_thread().ident
        threading.Timer(0.5, clock.around(lambda: signal.pthread_kill(main, signal.SIGINT))).start()
        distributed.all_reduce(torch.ones(1))  # waits in C++, where Python hears no signal

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1))
    clock.check()
    assert signal.getsignal(signal.SIGINT) is handler
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("first", [True, False], ids=["second", "only"])
def test_ctrl_c_while_a_run_is_cleaned_up_leaves_nothing_behind(monkeypatch, first):
    delete = shutil.rmtree

    def delete_late(folder, *args, **kwargs):
        if "nano_loop-" in Path(folder).name:  # the last thing to be done
            signal.raise_signal(signal.SIGINT)
        delete(folder, *args, **kwargs)

    def train(model):
        if first and small.rank() == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(shutil, "rmtree", delete_late)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1))
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_pressed_twice_is_one_interrupt():
    def train(model, heard):
        if small.rank() == 0:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
                heard.append("never")
            signal.raise_signal(signal.SIGINT)
            heard.append("still here")
            time.sleep(0.6)
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
                heard.append("never")

    heard = []
    nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1), heard)
    assert heard == ["still here"]


def test_run_ends_while_processes_of_a_loader_are_alive():
    def train(model, loader):
        batches = iter(loader)  # they have inherited all descriptors, and live as long as this
        next(batches)
        return batches

    model, _, loader = small.parts()
    loader = torch.utils.data.DataLoader(loader.dataset, batch_size=4, num_workers=1)
    assert len(list(nano(**small.OPTIONS)(train)(model, loader))) == 3


def test_interrupt_that_the_loop_handles_ends_nothing():
    def train(model, heard):
        if small.rank() == 0:
            try:
                signal.raise_signal(signal.SIGINT)
                time.sleep(1)
            except KeyboardInterrupt:
                heard.append(True)
        time.sleep(3)
        distributed.barrier()
        return heard

    assert nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1), []) == [True]


def test_handler_that_the_loop_installs_is_left_to_handle_interrupts():
    handled = []

    def handle(number, frame):
        handled.append(number)

    def train(model):
        if small.rank() == 0:
            signal.signal(signal.SIGINT, handle)
            signal.raise_signal(signal.SIGINT)
        time.sleep(3)
        distributed.barrier()

    before = signal.getsignal(signal.SIGINT)
    try:
        nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1))
        assert signal.getsignal(signal.SIGINT).__name__ == "handle"
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupt_that_processes_of_a_loader_get_too_is_one():
    def train(model, loader, heard):
        batches = iter(loader)
        next(batches)
        if small.rank() == 0:
            try:
                (process,) = multiprocessing.active_children()
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                heard.append(True)
            time.sleep(0.1)
            os.kill(process.pid, signal.SIGINT)  # as the terminal does
        time.sleep(3)
        distributed.barrier()

    model, _, loader = small.parts()
    loader = torch.utils.data.DataLoader(loader.dataset, batch_size=4, num_workers=1)
    heard = []
    nano(**small.OPTIONS)(train)(model, loader, heard)
    assert heard == [True]


def test_argument_that_cannot_be_pickled_is_named():
    model, optimizer, loader = small.parts()
    with pytest.raises(NanoError, match="lock"):
        nano(**small.OPTIONS)(small.fit)(model, optimizer, loader, threading.Lock())


def test_attribute_of_the_loop_that_cannot_be_pickled_is_named():
    class Loop(TorchNano):
        def __init__(self):
            super().__init__(**small.OPTIONS)
            self.guard = threading.Lock()

        def train(self):
            pass

    with pytest.raises(NanoError, match="guard"):
        Loop().train()


@pytest.fixture
def small_folder(monkeypatch, tmp_path):
    """A place for shared memory with room for one megabyte: a file system, or else a limit on files."""
    monkeypatch.setattr("nano_loop.distributed.launch.shared_folder.SHARED_MEMORY", tmp_path)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode == 0:
        yield tmp_path
        subprocess.run(["umount", str(tmp_path)], check=True)
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_folder_for_shared_memory_is_told_with_the_numbers(small_folder):
    def train(model, data):
        return data.sum()

    with pytest.raises(NanoWorkerError, match=r"(?s)bytes|MiB|MB") as caught:
        nano(**small.OPTIONS)(train)(torch.nn.Linear(1, 1), torch.ones(1 << 20))
    assert str(small_folder) in str(caught.value)
    assert list(small_folder.iterdir()) == []


def test_payload_that_fails_in_the_worker_is_told(clock):
    class Fragile:
        def __reduce__(self):
            return clock.around(fall_apart), ()

    def fall_apart():
        raise ImportError("no module for it here")

    model, optimizer, loader = small.parts()
    with raises(NanoWorkerError, rank=1) as caught:
        nano(**small.OPTIONS)(small.fit)(model, optimizer, loader, Fragile())
    clock.check()
    assert "no module for it here" in str(caught.value)


@pytest.mark.parametrize("content", [None, "#!/bin/sh\nexit 7\n", "#!/bin/sh\necho it is broken >&2\n"])
def test_interpreter_that_does_not_start_is_told(monkeypatch, tmp_path, content):
    broken = tmp_path / "python"
    if content is not None:
        broken.write_text(content)
        broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    before = time.monotonic()
    with raises(NanoWorkerError, rank=1):
        run()
    assert time.monotonic() - before < SOON


def test_worker_that_never_gets_ready_is_told_after_the_timeout(monkeypatch, tmp_path):
    sleeping = tmp_path / "python"
    sleeping.write_text("#!/bin/sh\nsleep 60\n")
    sleeping.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeping))
    with raises(NanoWorkerError, rank=1) as caught:
        run(timeout=2)
    assert "within 2 s" in str(caught.value)


def test_second_run_inside_the_first_is_refused():
    inner = nano(**small.OPTIONS)(small.fit)

    def train(model, optimizer, loader):
        inner(model, optimizer, loader)

    with pytest.raises(NanoError, match="a run inside a run of 2 processes"):
        nano(**small.OPTIONS)(train)(*small.parts())


def test_process_group_that_exists_is_refused(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(NanoError, match="in a process group of 1 already"):
            run()
    finally:
        distributed.destroy_process_group()


def test_run_after_a_failed_one_works():
    def fail():
        raise ValueError

    with pytest.raises(NanoWorkerError):
        run(on(1, 1, fail))
    assert run() == 8
