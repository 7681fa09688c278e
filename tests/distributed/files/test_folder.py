"""The folder for workers' files is created, found and deleted."""

import contextlib
import os

from nano_loop.distributed.files.folder import cache_folders, cache_folders_made, discard, place_of, workers_files


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


def test_working_folder_that_was_deleted_rules_no_cache_folder_out_but_relative_ones(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work").rmdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", "hub")
    folders = cache_folders()
    assert str(tmp_path / "cache") in folders
    assert not [folder for folder in folders if folder.endswith("hub")]


def test_missing_cache_folders_are_there_for_a_run_and_stay_where_somebody_has_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "used"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "unused/deep"))
    with cache_folders_made():
        (tmp_path / "used/kernel").write_text("x")
        assert (tmp_path / "unused/deep").is_dir()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["used", "used/kernel"]
