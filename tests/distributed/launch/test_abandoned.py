"""What a run has left of which every process was killed is deleted by the next one, and nothing else is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nano_loop.distributed.launch import shared_folder
from nano_loop.distributed.launch.abandoned import delete_abandoned, held
from nano_loop.distributed.launch.shared_folder import private_folder

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="nothing tells which processes there are")


@pytest.fixture(scope="module")
def gone():
    """The number of a process that has ended."""
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
    for name in ("files", "temporary"):  # of a rank of torchrun's
        (tmp_path / "disk" / f"nano_loop-{gone}-{name}").mkdir()
        (run / "rank 1").mkdir(exist_ok=True)
        (run / "rank 1" / name).symlink_to(tmp_path / "disk" / f"nano_loop-{gone}-{name}")
    delete_abandoned(tmp_path, "nano_loop-")
    assert names(tmp_path) == ["disk"]
    assert names(tmp_path / "disk") == []


def test_what_is_in_use_or_something_else_is_left(tmp_path, gone):
    kept = [f"nano_loop-{os.getpid()}-a", f"nano_loop-{gone}-held", f"nano_loop-{gone}", f"other-{gone}-a"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / f"nano_loop-{gone}-file").touch()
    (tmp_path / f"nano_loop-{gone}-link").symlink_to(tmp_path / kept[-1])
    before = names(tmp_path)
    with held(tmp_path / f"nano_loop-{gone}-held") as is_mine:  # as by a process of another container
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
