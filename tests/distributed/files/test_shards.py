"""Files that all ranks write together belong to the caller: each rank's part is moved to its real path."""

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from nano_loop.distributed.files import shards
from nano_loop.distributed.files.folder import workers_files
from nano_loop.distributed.files.original_os import original_os
from nano_loop.distributed.files.overlay import Overlay
from nano_loop.distributed.files.private_files import private_files
from nano_loop.distributed.files.private_files import shards as of_this_rank

pytestmark = pytest.mark.usefixtures("nothing_left")

COUNTERPARTS = {
    ("c/__1_0.distcp", 1): ["c/__0_0.distcp"],
    ("1.pt", 1): ["0.pt"],
    ("model-00002-of-00002", 1): ["model-00001-of-00002", "model-00002-of-00001"],
    ("rank_01/of 1", 1): ["rank_00/of 1", "rank_01/of 0"],
    ("10", 10): ["0", "00"],
    ("11", 10): ["01", "1"],
    ("log-12", 1): [],
    ("events.1764399999.host.4711.2", 3): [],
}


@pytest.mark.parametrize(("path", "rank"), COUNTERPARTS)
def test_counterpart_has_0_in_place_of_the_rank_or_1_in_place_of_the_next(path, rank):
    assert sorted(other.path for other in shards.counterparts(path, rank)) == COUNTERPARTS[path, rank]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of this process, which is rank 1 of a run."""
    place, run = Path(os.path.realpath(tmp_path)) / "place", Path(os.path.realpath(tmp_path)) / "run"
    place.mkdir()
    run.mkdir()
    monkeypatch.chdir(place)
    with workers_files(run), private_files(1, run, 0):
        yield place


def rank_0(path, content="of rank 0"):
    with original_os.open_file(path, "w") as file:
        file.write(content)


def real(folder):
    """Return the caller's contents of a folder, by path."""
    found = {}
    for name in original_os.listdir(folder):
        path = f"{folder}/{name}"
        if stat.S_ISDIR(original_os.lstat(path).st_mode):
            found |= {f"{name}/{inner}": content for inner, content in real(path).items()}
        else:
            with original_os.open_file(path) as file:
                found[name] = file.read()
    return found


def test_parts_are_moved_and_what_rank_0_lacks_or_has_itself_stays_private(folder):
    theirs = ("0.pt", "chunk 0 0", "both 0", "both 1", "late 0", "late 1")
    for name in theirs:
        rank_0(name)
    for name in ("1.pt", "chunk 1 0", "chunk 1 7", "both 0", "both 1", "late 1", "alone 1"):
        Path(name).write_text("of rank 1")
    of_this_rank().move()
    own = dict.fromkeys(("1.pt", "chunk 1 0", "chunk 1 7"), "of rank 1")
    assert real(folder) == dict.fromkeys(theirs, "of rank 0") | own
    assert {path.name: path.read_text() for path in folder.iterdir() if "1" in path.name} == own | dict.fromkeys(
        ("both 1", "late 1", "alone 1"), "of rank 1"
    )


@pytest.fixture(params=["one disk", "two disks"])
def disks(request, folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "another disk")

    with monkeypatch.context() as patch:
        if request.param == "two disks":
            patch.setattr(original_os, "rename", refuse)
        yield


def test_part_can_be_written_again_changed_and_removed(folder, disks):
    rank_0("rank 0")
    with open("rank 1", "w") as log:
        log.write("first ")
        log.flush()
        of_this_rank().move()
        assert real(folder)["rank 1"] == "first "
        log.write("second ")
    of_this_rank().move()
    with open("rank 1", "a") as log:
        log.write("third")
    of_this_rank().move()
    assert real(folder)["rank 1"] == "first second third" == Path("rank 1").read_text()
    torch.save(1, "rank 1")
    of_this_rank().move()
    assert torch.load("rank 1") == 1
    with pytest.raises(FileExistsError):
        Path("rank 1").touch(exist_ok=False)
    os.remove("rank 1")
    assert [*real(folder)] == ["rank 0"] == os.listdir()


def test_folder_of_a_rank_is_made_moved_and_removed_with_its_parts(folder):
    original_os.mkdir("0")
    rank_0("0/x")
    os.makedirs("1/empty")
    Path("1/x").write_text("of rank 1")
    of_this_rank().move()
    assert real(folder) == {"0/x": "of rank 0", "1/x": "of rank 1"}
    original_os.rename("0", "done 0")
    os.rename("1", "done 1")
    of_this_rank().move()
    assert real(folder) == {"done 0/x": "of rank 0", "done 1/x": "of rank 1"}
    assert sorted(os.listdir("done 1")) == ["empty", "x"]
    shutil.rmtree("done 1")
    assert [*real(folder)] == ["done 0/x"]


def test_rank_that_has_chosen_the_first_free_number_keeps_what_it_writes(folder):
    original_os.mkdir("run 0")
    rank_0("run 0/last")
    number = 0
    while os.path.exists(f"run {number}"):
        number += 1
    os.mkdir(f"run {number}")
    Path(f"run {number}/last").write_text("of rank 1")
    of_this_rank().move()
    assert [*real(folder)] == ["run 0/last"]


@pytest.mark.parametrize("in_folder", [True, False], ids=["working folder", "file of rank 0"])
def test_number_of_a_run_of_several_at_once_is_not_that_of_a_rank(folder, in_folder, monkeypatch):
    """Another run, unknown to ranks 0 and 1, uses the folder with the other number."""
    for run in (0, 1):
        original_os.mkdir(f"trial {run}")
        original_os.mkdir(f"trial {run}/saved")
    rank_0("trial 0/saved/last")
    if in_folder:
        monkeypatch.chdir("trial 1")
        Path("saved/last").write_text("of rank 1")
    else:
        Path("trial 1/saved/last").write_text("of rank 1")
        rank_0("trial 1/log")
    of_this_rank().move()
    assert "trial 1/saved/last" not in real(folder)


def test_folder_that_rank_0_has_renamed_already_is_seen_with_all_that_is_in_it(folder):
    os.mkdir("new")
    Path("new/own").write_text("of rank 1")
    original_os.mkdir("ready")
    rank_0("ready/own")
    rank_0("ready/guarded")
    os.rename("new", "ready")
    assert {path.name: path.read_text() for path in Path("ready").iterdir()} == {
        "own": "of rank 1",
        "guarded": "of rank 0",
    }


def test_folder_that_rank_0_renames_meanwhile_is_seen_at_its_new_place(folder, monkeypatch):
    def copy_up(overlay, key):
        if original_os.access("new", os.F_OK):
            original_os.rename("new", "ready")
        return copy(overlay, key)

    copy = Overlay.copy_up
    original_os.mkdir("new")
    rank_0("new/guarded")
    Path("new/own").write_text("of rank 1")
    monkeypatch.setattr(Overlay, "copy_up", copy_up)
    os.rename("new", "ready")
    assert sorted(os.listdir("ready")) == ["guarded", "own"]
    assert os.listdir() == ["ready"]
