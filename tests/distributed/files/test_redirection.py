"""A process with redirected files sees a consistent file system, and does not change the caller's files."""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from distributed.files import operations, redirected
from distributed.files.test_writers import contents
from distributed.launch.started import environment

LIBRARIES = ("safetensors", "tensorboard")
# Checks that warn come after those that must not, and the one that forks is last.
CHECKS = ("functions", "not_redirected", "temporary", "behind", *LIBRARIES)
CHECKS += ("unseen", "removed_and_made_again", "forked")
TOUCHED = ("not_redirected", "unseen", "removed_and_made_again")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run all checks of `redirected`, each in its own folder; return their results, and what the program has left."""
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
    cached = sorted(path.name for path in cache.iterdir())
    return SimpleNamespace(
        checks=json.loads(done.stdout), stderr=done.stderr, folder=folder, cache=cached, changed=changed
    )


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
    assert found["names"] == ["new", "new"]
    assert found["sets"] == [True] * 3
    assert found["removed"] == "FileNotFoundError"


_IN_PARENT = ["a", "b", "by child", "d", "earlier", "f", "link"]
FOUND = {
    # Devices and pipes are real.
    "not_redirected": {"pipe": "through", "full": "OSError"},
    # Forked processes share the private files.
    "forked": ["1", False, _IN_PARENT, "2", sorted([*_IN_PARENT, "by parent"])],
    # Changes by other means are refused.
    "unseen": ["PermissionError", -1],
    # A worker that lags behind rank 0 accepts operations that are already done.
    "behind": [
        dict.fromkeys(("mkdir", "makedirs", "exclusive", "remove", "rmdir", "rmtree", "remove in a folder", "replace"))
        | {"replace, to nowhere": "FileNotFoundError", "symlink": "FileExistsError"},
        None,
        ["a", "b", "before", "f", "link"],
    ],
    # A file is visible if rank 0 makes it after the worker has removed its name.
    "removed_and_made_again": [
        [["a", "b", "d", "link"], "FileNotFoundError"],
        "again\n",
        ["a", "b", "before", "d", "f", "link"],
        ["new"],
    ],
    # Libraries write and read private copies.
    "safetensors": [[3.0, 3.0], [3.0, 3.0], ["bias", "weight"]],
    "tensorboard": [[3.0, 2.0, 1.0], 1, True],
}


@pytest.mark.parametrize("name", FOUND)
def test_redirected_process_finds(name, found):
    if name in LIBRARIES:
        pytest.importorskip(name)
    assert found.checks[name] == FOUND[name]


def test_caches_and_standard_error_are_the_real_ones(found):
    assert found.stderr.startswith("to standard error")
    assert found.cache == ["kept"]


def test_temporary_files_lie_in_the_private_folder_those_of_other_programs_too(found):
    private, made = f"{found.folder}.private/1/temporary", found.checks["temporary"]
    assert {os.path.dirname(name) for name in made["names"]} == {private}
    assert made["default"] != private
    assert made["read"] == "x"
    assert made["left"] == [False, False, True, True]
