"""The ranks of one host get a process group without a socket, and a failed one leaves nothing behind."""

import os
import signal
import stat
import threading
import time

import psutil
import pytest
from torch import distributed

from distributed import small
from nano_loop import NanoError, nano
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch import group
from nano_loop.distributed.launch.group import local_group, process_group
from nano_loop.distributed.launch.shared_folder import private_folder, refuse_foreign_folder

pytestmark = pytest.mark.usefixtures("nothing_left")


def meet_alone(rank=0, **options):
    """Join as one of two ranks; the other one does not come."""
    with private_folder() as folder, local_group(Ranks(rank, 2, folder=folder, **options), None):
        raise AssertionError("nobody came")


def test_runs_after_groups_that_did_not_come_about_work():
    def fail():
        raise ChildProcessError("rank 1 is dead")

    started = time.monotonic()
    for rank in range(2):
        with pytest.raises(ChildProcessError, match="rank 1 is dead"):
            meet_alone(rank, check=fail)
        timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            meet_alone(rank)
        timer.join()
    with pytest.raises(NanoError, match=r"waited 0.2 seconds for rank 1 to exchange values"):
        meet_alone(timeout=0.2)
    assert time.monotonic() - started < 10  # without waiting for the timeout of 600 s
    assert not distributed.is_initialized()
    assert nano(**small.OPTIONS)(small.fit)(*small.parts()) == 8


def test_group_of_torch_that_failed_does_not_number_the_next_one_otherwise(tmp_path):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    backend = distributed.ProcessGroupGloo
    distributed.distributed_c10d.ProcessGroupGloo = fail
    try:
        with pytest.raises(KeyboardInterrupt), process_group(store, Ranks(0, 1), "gloo"):
            pass
    finally:
        distributed.distributed_c10d.ProcessGroupGloo = backend
    with process_group(store, Ranks(0, 1), "gloo"):
        assert distributed.group.WORLD.group_name == "0"


def test_store_of_a_rank_that_has_left_touches_no_file_while_rank_0_deletes_the_folder(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(group, "FileStore", lambda *given: made.append(distributed.FileStore(*given)) or made[0])
    with local_group(Ranks(0, 1, folder=tmp_path), None):
        assert (tmp_path / "store-0").exists()
    assert os.listdir(tmp_path) == ["store"]  # the name that torch would open is removed before the store
    os.symlink("store", tmp_path / "link")
    store = distributed.FileStore(str(tmp_path / "link"), 2)
    written = (tmp_path / "store").read_bytes()
    os.unlink(tmp_path / "link")
    del store
    assert (tmp_path / "store").read_bytes() == written


def test_our_backend_outside_a_run_is_refused(tmp_path):
    nano(**small.OPTIONS)(small.fit)(*small.parts())  # registers the name with torch
    with pytest.raises(NanoError, match="process_group_backend='nano_loop'"):
        nano(process_group_backend="nano_loop")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    with pytest.raises(NanoError, match=r"backend='nano_loop' outside a run: .*Use \"gloo\""):
        distributed.init_process_group("nano_loop", store=store, rank=0, world_size=1)
    distributed.distributed_c10d._world.group_count = 0  # the state after a failure in user code


@pytest.mark.slow
def test_gloo_that_is_asked_for_is_on_the_loopback_alone_whatever_the_environment_says(monkeypatch):
    def train(model):
        distributed.barrier()
        groups = distributed.get_backend(), distributed.new_group([0, 1], backend="gloo")
        distributed.barrier(group=groups[1])
        found = [each.laddr.ip for each in psutil.Process().net_connections("inet")]
        return small.everywhere((groups[0], found))

    for name in ("lo-that-is-not-there", "eth0"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        options = small.OPTIONS | {"process_group_backend": "gloo"}
        for backend, addresses in nano(**options)(train)(small.parts()[0]):
            assert backend == "gloo"
            assert addresses
            assert {each.removeprefix("::ffff:") for each in addresses} <= {"127.0.0.1", "::1"}
        assert os.environ["GLOO_SOCKET_IFNAME"] == name


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_folder_is_this_user_s_alone_whatever_the_umask(umask):
    before = os.umask(umask)
    try:
        with private_folder() as folder:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            refuse_foreign_folder(folder)
    finally:
        os.umask(before)


def test_folder_that_others_may_enter_a_link_and_a_file_are_refused(tmp_path):
    private, link, file = tmp_path / "private", tmp_path / "link", tmp_path / "file"
    private.mkdir(0o700)
    link.symlink_to(private)
    file.touch(0o600)
    refuse_foreign_folder(private)
    private.chmod(0o750)
    for path in (private, link, file):
        with pytest.raises(NanoError, match=r"has the mode .*: it must be a folder that only user"):
            refuse_foreign_folder(path)
    with pytest.raises(NanoError, match="cannot be found"):
        refuse_foreign_folder(tmp_path / "absent")
