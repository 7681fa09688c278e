"""File access from compiled code in a worker either works or raises an error immediately that names the file."""

import ctypes
import errno
import os
import sqlite3
from pathlib import Path

import pytest
import torch
from torch import nn

from distributed import small
from nano_loop import NanoWorkerError, is_global_zero, nano
from nano_loop.distributed.files.overlay import Overlay
from nano_loop.distributed.files.refused import explaining_files

pytestmark = pytest.mark.usefixtures("nothing_left")

LIBC = ctypes.CDLL(None, use_errno=True)


def opened(path, flags):
    """Open a file as compiled code does, and raise Rust's error, which has no file name."""
    descriptor = LIBC.open(os.fsencode(path), flags, 0o600)
    if descriptor < 0:
        number = ctypes.get_errno()
        raise RuntimeError(f"{os.strerror(number)} (os error {number})")
    return descriptor


def write(path):
    os.close(opened(path, os.O_WRONLY | os.O_CREAT))


def read(path):
    os.close(opened(path, os.O_RDONLY))


def written_into_a_new_folder(out):
    os.makedirs(out / "new", exist_ok=True)
    write(f"{out}/new/file")


def written_over_the_callers(out):
    write(out / "file")


def read_where_the_rank_has_written(out):
    Path(out, "mine").write_text("x")
    read(str(out / "mine"))


def written_into_a_renamed_folder(out):
    os.makedirs(out / "tmp")
    os.rename(out / "tmp", out / "done")
    write(out / "done" / "file")


def added_to_a_database(out):
    connection = sqlite3.connect(out / "file")
    connection.execute("create table new (value)")


UNGUARDED = {
    written_into_a_new_folder: "new/file",
    written_over_the_callers: "file",
    read_where_the_rank_has_written: "mine",
    written_into_a_renamed_folder: "done/file",
    added_to_a_database: "file",
}


QUICK = (written_over_the_callers, added_to_a_database)


@pytest.mark.parametrize("use", [pytest.param(use, marks=[pytest.mark.slow] * (use not in QUICK)) for use in UNGUARDED])
def test_compiled_code_in_a_worker_gets_an_error_that_names_the_file(use, tmp_path):
    def train(model, out):
        if small.rank() == 1:
            use(out)
        torch.distributed.barrier()

    (tmp_path / "file").touch()
    with pytest.raises(NanoWorkerError) as caught:
        nano(**small.OPTIONS)(train)(nn.Linear(1, 1), tmp_path)
    message = str(caught.value)
    for word in ("rank 1", "compiled code", str(tmp_path / UNGUARDED[use]), "nano_loop.is_global_zero()"):
        assert word in message
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b""


def test_compiled_code_on_rank_0_is_right_and_its_files_are_read_by_all(tmp_path):
    def train(model, out):
        os.makedirs(out / "new")  # both ranks do this, in any order
        if is_global_zero():
            write(out / "new" / "file")
            sqlite3.connect(out / "database").execute("create table new (value)").connection.close()
        torch.distributed.barrier()
        read(out / "new" / "file")
        assert sqlite3.connect(out / "database").execute("select * from new").fetchall() == []
        with pytest.raises(FileExistsError):
            os.mkdir(out / "new")

    nano(**small.OPTIONS)(train)(nn.Linear(1, 1), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["database", "new"]


@pytest.fixture
def overlay(tmp_path):
    overlay = Overlay()
    overlay.begin(1, os.path.realpath(tmp_path), str(tmp_path), 0, ())
    return overlay


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_told_with_its_folder(overlay, number):
    with pytest.raises(OSError, match=r"the disk of /.* is full .*TMPDIR.*is_global_zero") as caught:  # noqa: SIM117
        with explaining_files(overlay):
            raise OSError(number, os.strerror(number))
    assert overlay.root in str(caught.value)
    assert caught.value.__cause__.errno == number


def test_error_of_torch_is_explained_where_the_disk_is_full(overlay, monkeypatch):
    class Full:
        f_bavail, f_frsize = 10, 512

    with pytest.raises(RuntimeError, match="stays"), explaining_files(overlay):
        raise RuntimeError("stays")
    monkeypatch.setattr("os.statvfs", lambda path: Full)
    with pytest.raises(OSError, match=r"is full .*file write failed"), explaining_files(overlay):
        raise RuntimeError("file write failed")


def test_other_errors_stay(overlay):
    with pytest.raises(FileNotFoundError), explaining_files(overlay):
        os.stat("nowhere")
