"""Only the leftovers of killed processes are deleted by others."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.launch.started import environment
from nano_loop.distributed.launch import shared_folder
from nano_loop.distributed.launch.shared_folder import delete_abandoned, held, private_folder

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="nothing tells which processes there are")


@pytest.fixture(scope="module")
def gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_folder_of_a_process_that_is_gone_is_deleted_with_what_its_workers_wrote(tmp_path, gone):
    run, written = tmp_path / f"nano_loop-{gone}-a", tmp_path / "disk" / f"nano_loop-{gone}-b"
    run.mkdir()
    (run / "payload").touch()
    written.mkdir(parents=True)
    (run / "files").symlink_to(written)
    delete_abandoned(tmp_path, "nano_loop-")
    assert names(tmp_path) == ["disk"]
    assert names(tmp_path / "disk") == []


# Holds the folder of its own id, left half deleted by a killed process, and forks a process that outlives it.
HOLD = """
import os, sys, time
from pathlib import Path
from nano_loop.distributed.launch.shared_folder import held

folder, written = (Path(sys.argv[1], f"nano_loop-{os.getpid()}-{name}") for name in ("held", "written"))
folder.mkdir()
Path(f"{written}.gone").mkdir()
(folder / "files").symlink_to(written)
with held(folder):
    if os.fork() == 0:  # which has given up the lock by then
        print("held", flush=True)
    time.sleep(60)
"""


def test_killed_process_leaves_nothing_although_a_child_lives_on_and_its_parent_has_not_waited(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), start_new_session=True)
    try:
        assert process.stdout.readline() == b"held\n"
        delete_abandoned(tmp_path, "nano_loop-")
        assert len(names(tmp_path)) == 2
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        delete_abandoned(tmp_path, "nano_loop-")
        assert names(tmp_path) == []
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_what_is_in_use_or_something_else_is_left(tmp_path, gone):
    kept = [f"nano_loop-{os.getpid()}-a", f"nano_loop-{gone}-held", f"nano_loop-{gone}", f"other-{gone}-a"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / f"nano_loop-{gone}-file").touch()
    (tmp_path / f"nano_loop-{gone}-link").symlink_to(tmp_path / kept[-1])
    before = names(tmp_path)
    with held(tmp_path / f"nano_loop-{gone}-held") as is_mine:  # as a process of another container does
        assert is_mine
        delete_abandoned(tmp_path, "nano_loop-")
    assert names(tmp_path) == before


def test_files_behind_a_link_that_leads_elsewhere_are_left(tmp_path, gone):
    run, elsewhere = tmp_path / f"nano_loop-{gone}-a", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / "files").symlink_to(elsewhere)
    delete_abandoned(tmp_path, "nano_loop-")
    assert names(tmp_path) == ["elsewhere"]


def test_run_holds_its_folder_and_deletes_what_others_have_left(tmp_path, gone, monkeypatch):
    monkeypatch.setattr(shared_folder, "SHARED_MEMORY", tmp_path)
    (tmp_path / f"nano_loop-{gone}-a").mkdir()
    with private_folder() as folder:
        assert names(tmp_path) == [folder.name]
        with held(folder) as is_mine:
            assert not is_mine
    assert names(tmp_path) == []
