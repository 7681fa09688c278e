"""The folder for what workers write is made, found and deleted, and a full disk is explained."""

import contextlib
import errno
import os

import pytest

from nano_loop.distributed.files.caches import cache_folders
from nano_loop.distributed.files.folder import discard, explaining_full_disk, place_of, workers_files
from nano_loop.distributed.files.originals import real
from nano_loop.distributed.files.private_files import private_files
from nano_loop.distributed.files.table import MadeFolders


def test_folder_lies_on_disk_for_its_owner_alone_and_is_deleted_after_an_error(tmp_path, monkeypatch):
    temporary, run = tmp_path / "temporary", tmp_path / "run"
    temporary.mkdir()
    run.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with workers_files(run), contextlib.suppress(KeyError):
        assert os.path.dirname(place_of(run)) == str(temporary)
        assert os.stat(place_of(run)).st_mode & 0o777 == 0o700
        with open(f"{place_of(run)}/file", "w"):
            raise KeyError
    assert [*temporary.iterdir()] == []


def test_folder_is_deleted_once_by_whoever_comes_first(tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    discard(folder)
    discard(folder)
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def run(tmp_path):
    with workers_files(tmp_path):
        yield tmp_path


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_told_with_its_folder(run, number):
    with pytest.raises(OSError, match=r"the disk of /.* is full .*TMPDIR.*is_global_zero") as caught:  # noqa: SIM117
        with explaining_full_disk(run):
            raise OSError(number, os.strerror(number))
    assert place_of(run) in str(caught.value)
    assert caught.value.__cause__.errno == number


def test_error_of_torch_is_explained_where_the_disk_is_full(run, monkeypatch):
    class Full:
        f_bavail, f_frsize = 10, 512

    with pytest.raises(RuntimeError, match="stays"), explaining_full_disk(run):
        raise RuntimeError("stays")
    monkeypatch.setattr("os.statvfs", lambda path: Full)
    with pytest.raises(OSError, match=r"is full .*file write failed"), explaining_full_disk(run):
        raise RuntimeError("file write failed")


def test_other_errors_stay(run):
    with pytest.raises(FileNotFoundError), explaining_full_disk(run):
        os.stat("nowhere")


def test_cache_that_holds_the_working_folder_is_no_cache(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to("cache")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "link"))
    folders = cache_folders()
    assert str(tmp_path / "cache") in folders
    assert str(tmp_path) not in folders


def test_folder_is_noted_when_rank_0_can_see_it(tmp_path, monkeypatch):
    def mkdir(path, mode=0o777):
        os_mkdir(path, mode)
        if path == str(tmp_path / "new"):
            with pytest.raises(FileExistsError):
                os_mkdir(path)
            claimed.append(MadeFolders(tmp_path / "run").claim(path))  # as rank 0's `os.mkdir` does

    claimed, os_mkdir = [], os.mkdir
    for name in ("run", "own"):
        (tmp_path / name).mkdir()
    with workers_files(tmp_path / "own"), private_files(tmp_path / "run", tmp_path / "own", since=0):
        monkeypatch.setattr(real, "mkdir", mkdir)
        os.mkdir(tmp_path / "new")
        monkeypatch.undo()
    assert claimed == [True]
