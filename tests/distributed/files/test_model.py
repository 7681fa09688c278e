"""The private files of a rank against a model of them: a plain process with its own copy of the tree.

`operations` documents the differences: one of the caller's folders keeps its mode and its times.
"""

import os
import shutil
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from distributed.files import operations
from distributed.files.operations import NAMES, on_one, on_two
from distributed.files.test_writers import contents
from nano_loop.distributed.files.folder import workers_files
from nano_loop.distributed.files.private_files import private_files

# Whether the paths are absolute, the operation, and its paths.
OPERATIONS = st.tuples(
    st.booleans(), st.sampled_from([*on_one(), *on_two()]), st.sampled_from(NAMES), st.sampled_from(NAMES)
)


def done(folder, drawn):
    """Return the results of the operations in a folder, and the folder's contents afterwards."""
    before, one, two = os.getcwd(), on_one(), on_two()
    os.chdir(folder)
    try:
        for is_absolute, name, *paths in drawn:
            paths = [os.path.join(folder, path) if is_absolute else path for path in paths[: 1 + (name in two)]]
            given = operations.given((one | two)[name], *paths)
            yield f"{name} {paths}: {given}".replace(str(folder), "FOLDER")
        yield from map(str, operations.contents())
    finally:
        os.chdir(before)


@contextmanager
def rank(run):
    """Make this process rank 1 of a run that began before any file existed."""
    run.mkdir()
    with workers_files(run), private_files(1, run, 1 << 62):
        yield


def check(drawn):
    with tempfile.TemporaryDirectory() as place:
        place = Path(os.path.realpath(place))
        for name in ("callers/tree", "copy/tree"):  # a link that is moved may point outside
            (place / name).mkdir(parents=True)
            operations.fill(place / name)
        before = contents(place / "callers")
        expected = [*done(place / "copy/tree", drawn)]
        with rank(place / "run"):
            found = [*done(place / "callers/tree", drawn)]
        assert found == expected
        assert contents(place / "callers") == before


def search(check, *phases):
    options = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": [*HealthCheck]}
    settings(max_examples=100, phases=phases, **options)(given(st.lists(OPERATIONS, max_size=25))(check))()


@pytest.mark.slow
def test_rank_sees_what_a_process_with_its_own_copy_sees():
    before = functions()
    search(check, *Phase)
    assert functions() == before


# Only operations on two paths use the second path.
SWAPS = {
    "a new folder in the place of a moved one": [
        ("mkdir", "new", ""),
        ("write_text", "new/x", ""),
        ("rename", "d", "old"),
        ("rename", "new", "d"),
        ("rmtree", "old", ""),
    ],
    "a folder with one of a name in the removed one": [
        ("makedirs", "new/e/b", ""),
        ("rmtree", "d", ""),
        ("move", "new", "d"),
        ("remove", "d/e/b", ""),
    ],
    "a folder in which a name of the removed one was removed": [
        ("remove", "d/a", ""),
        ("rmtree", "f", ""),
        ("replace", "d", "f"),
    ],
    "a file, then a folder": [
        ("rmtree", "d", ""),
        ("rename", "a", "d"),
        ("rename", "d", "c"),
        ("rename", "f", "d"),
    ],
}


@pytest.mark.parametrize("swap", SWAPS)
def test_folder_that_is_renamed_to_a_removed_one_shows_nothing_of_that(swap):
    check([(False, *operation) for operation in SWAPS[swap]])


def test_folders_of_multiprocessing_are_real_since_compiled_code_binds_sockets_in_them(tmp_path):
    """Loader workers send tensors through such a socket; with a private folder, batches never arrived."""
    with rank(Path(os.path.realpath(tmp_path)) / "run"):
        folder = tempfile.mkdtemp(prefix="pymp-")  # as `multiprocessing.util.get_temp_dir` does
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.join(folder, "listener"))
    assert os.listdir(folder) == ["listener"]
    shutil.rmtree(folder)


def functions():
    return [os.open, os.stat, os.mkdir, os.scandir, os.supports_fd.copy(), shutil.rmtree, open, tempfile.mkdtemp]
