"""A process that is redirected as workers are sees a file system, and changes none of the caller's files."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from distributed.files import operations, redirected
from distributed.files.test_writers import contents
from distributed.launch.started import environment

LIBRARIES = ("safetensors", "tensorboard", "transformers")
# The one that warns comes after those that must not, and the one that forks last.
CHECKS = ("functions", "not_redirected", "temporary", "behind", *LIBRARIES)
CHECKS += ("unseen", "removed_and_made_again", "forked")
TOUCHED = ("not_redirected", "unseen", "removed_and_made_again")


@dataclass
class Found:
    """What one program has found, what it has printed as errors, and where it was."""

    checks: dict
    stderr: str
    folder: Path
    cache: list
    changed: list


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Let all checks of `redirected` run, each in its folder."""
    place = tmp_path_factory.mktemp("redirected")
    folder, cache = place / "folder", place / "cache"
    cache.mkdir()
    checks = [name for name in CHECKS if name not in LIBRARIES or importlib.util.find_spec(name)]
    for name in checks:
        (folder / name).mkdir(parents=True)
        prepare(name, folder / name)
    before = {name: contents(folder / name) for name in checks}
    program = [sys.executable, "-W", "error", redirected.__file__, str(folder), *checks]
    done = subprocess.run(program, env=environment(XDG_CACHE_HOME=cache), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    changed = [name for name in checks if contents(folder / name) != before[name]]
    return Found(json.loads(done.stdout), done.stderr, folder, sorted(path.name for path in cache.iterdir()), changed)


def prepare(name, folder):
    if name == "not_redirected":
        os.mkfifo(folder / "before pipe")
    else:
        operations.fill(folder)
        (folder / "before").write_text("before")
        (folder / "f/a").write_text("f/a before")


def test_files_of_the_caller_stay_as_they_are(found):
    assert set(found.changed) <= set(TOUCHED)


def test_functions_are_like_the_ones_they_replace(found):
    found = found.checks["functions"]
    assert found["by name"] == [True] * 3
    assert found["named"] == [["cio", "open"], ["cos", "replace"], ["cos", "stat"]]
    assert found["signature"][1] == "(src, dst, *, src_dir_fd=None, dst_dir_fd=None)"
    assert found["signature"][0].startswith("(file, mode='r', buffering=-1")
    assert found["names"] == ["new", "new", "raw"]
    assert found["kinds"] == [True, True, False]
    assert found["sets"] == [True] * 3
    assert found["removed"] == "FileNotFoundError"


def test_devices_pipes_and_caches_are_the_real_ones(found):
    assert found.checks["not_redirected"] == {"pipe": "through", "full": "OSError"}
    assert found.stderr.startswith("to standard error")
    assert found.cache == ["kept"]


def test_temporary_files_lie_in_the_private_folder_those_of_other_programs_too(found):
    private, made = f"{found.folder}.private/1/temporary", found.checks["temporary"]
    assert {os.path.dirname(name) for name in made["names"]} == {private}
    assert made["default"] != private
    assert made["read"] == "x"
    assert made["left"] == [False, False, True, True]


def test_forked_processes_share_the_files(found):
    names = ["a", "b", "by child", "d", "earlier", "f", "link"]
    in_child = sorted([*names, "by parent"])
    assert found.checks["forked"] == ["1", False, names, "2", in_child]


def test_change_in_another_way_is_refused(found):
    assert found.checks["unseen"] == ["PermissionError", -1]


def test_worker_that_is_behind_rank_0_does_not_stumble_over_what_is_done(found):
    done, removed, left = found.checks["behind"]
    assert done == {
        "mkdir": None,
        "makedirs": None,
        "exclusive": None,
        "remove": None,
        "rmdir": None,
        "rmtree": None,
        "remove in a folder": None,
        "replace": None,
        "replace, to nowhere": "FileNotFoundError",
        "symlink": "FileExistsError",
    }
    assert removed is None
    assert left == ["a", "b", "before", "f", "link"]


def test_file_that_rank_0_makes_after_the_worker_has_removed_its_name_is_seen(found):
    gone, text, names, inside = found.checks["removed_and_made_again"]
    assert gone == [["a", "b", "d", "link"], "FileNotFoundError"]
    assert text == "again\n"
    assert names == ["a", "b", "before", "d", "f", "link"]
    assert inside == ["new"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_that_are_installed_write_and_read_private_copies(name, found):
    pytest.importorskip(name)
    expected = {
        "safetensors": [[3.0, 3.0], [3.0, 3.0], ["bias", "weight"]],
        "tensorboard": [[3.0, 2.0, 1.0], 1, True],
        "transformers": [True, ["config.json", "model.safetensors"]],
    }
    assert found.checks[name] == expected[name]
