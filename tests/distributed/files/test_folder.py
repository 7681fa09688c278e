"""The folder for what workers write is made, found and deleted."""

import contextlib
import os

import pytest

from nano_loop.distributed.files.caches import cache_folders
from nano_loop.distributed.files.folder import discard, place_of, workers_files
from nano_loop.distributed.files.made_folders import MadeFolders
from nano_loop.distributed.files.originals import real
from nano_loop.distributed.files.private_files import private_files


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
