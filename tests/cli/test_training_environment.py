"""The variables for training on a machine, and how they are undone."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_loop.cli import training_environment as module
from nano_loop.cli.training_environment import (
    TrainingEnvironment,
    before_exports,
    exported,
    find_library,
    training_environment,
)
from nano_loop.cpu import LogicalCpu, Machine
from nano_loop.cpu.glibc import SETTINGS_AS_VARIABLES, libraries_in
from nano_loop.errors import NanoConfigError

MACHINE = Machine("A CPU", "x86_64", tuple(LogicalCpu(each, each // 2 * 2) for each in range(8)), tuple(range(8)))


@pytest.fixture(autouse=True)
def linux_with_glibc(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(module, "is_glibc", lambda: True)


@pytest.fixture
def made(tmp_path):
    """Return a function that returns the variables for an environment and for libraries to preload."""
    return lambda environ=None, *preload: training_environment(MACHINE, environ or {}, preload, tmp_path / "root")


def test_another_c_library_has_no_settings(made, monkeypatch):
    monkeypatch.setattr(module, "is_glibc", lambda: False)
    assert made().values == {"OMP_NUM_THREADS": "4"}


THREADS = {"OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize(
    ("environ", "values", "kept"),
    [
        ({}, {**THREADS, **SETTINGS_AS_VARIABLES}, []),
        *(({"OMP_NUM_THREADS": text}, SETTINGS_AS_VARIABLES, ["OMP_NUM_THREADS"]) for text in ("1", "", " 4")),
        ({**THREADS, **SETTINGS_AS_VARIABLES}, {}, []),  # variables that already have these values are not reported
        *(({name: "1"}, THREADS, [name]) for name in ("MALLOC_TOP_PAD_", "GLIBC_TUNABLES")),
        ({"LD_PRELOAD": "libmimalloc.so.2"}, THREADS, []),
    ],
    ids=str,
)
def test_threads_are_the_cores_glibc_keeps_memory_and_what_is_set_stays(made, environ, values, kept):
    assert (made(environ).values, made(environ).kept) == (values, kept)


INTEL = "intel-openmp"


@pytest.mark.parametrize(
    ("name", "path", "more"),
    [
        ("jemalloc", "root/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", {"MALLOC_CONF": module._MALLOC_CONF}),
        ("tcmalloc", "root/usr/lib/libtcmalloc.so.4", {}),
        ("tcmalloc", "root/usr/lib/libtcmalloc_minimal.so.4", {}),
        (INTEL, "prefix/lib/libiomp5.so", {"KMP_BLOCKTIME": "1", **SETTINGS_AS_VARIABLES}),
    ],
)
def test_library_is_found_by_its_names_and_an_allocator_takes_the_place_of_glibcs_settings(
    made, library, tmp_path, name, path, more
):
    path = str(library(path, tmp_path))
    assert made({}, name).values == {**THREADS, "LD_PRELOAD": path, **more}


@pytest.mark.parametrize(
    ("before", "after"),
    [("/a.so", "{}:/a.so"), (" /a.so b.so", "{}: /a.so b.so"), ("", "{}"), (" : ", "{}")],
)
def test_what_is_preloaded_stays_behind(made, library, before, after):
    path = str(library("usr/lib/libiomp5.so"))
    assert made({"LD_PRELOAD": before}, INTEL).values["LD_PRELOAD"] == after.format(path)
    assert "LD_PRELOAD" not in made({"LD_PRELOAD": f"/a.so:{path}"}, INTEL).values  # already preloaded


def test_second_allocator_is_refused(made, library):
    library("usr/lib/libjemalloc.so")
    with pytest.raises(
        NanoConfigError, match=r"jemalloc and tcmalloc \(LD_PRELOAD=libtcmalloc.so.4\): .* one allocator"
    ):
        made({"LD_PRELOAD": "libtcmalloc.so.4"}, "jemalloc")


@pytest.mark.parametrize("name", ["jemalloc", "tcmalloc", "intel-openmp"])
def test_library_that_is_not_there_is_refused_with_its_package(made, name):
    with pytest.raises(NanoConfigError, match=rf"--{name}: lib\w+\.so was not found\. Install it \(.+\), or omit"):
        made({}, name)


def test_other_systems_preload_nothing(made, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NanoConfigError, match="--jemalloc: libraries can be preloaded only on Linux"):
        made({}, "jemalloc")


names = st.sampled_from(["OMP_NUM_THREADS", "LD_PRELOAD", "MALLOC_CONF", "OTHER"])
values = st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=8)


@given(before=st.dictionaries(names, values), values=st.dictionaries(names, values))
def test_way_back_leads_to_what_was_there(before, values):
    after = exported(before, TrainingEnvironment(values))
    assert {name: after[name] for name in values} == values
    assert before_exports(after) == before
    again = exported(before_exports(after), TrainingEnvironment({"OMP_NUM_THREADS": "2"}))
    assert before_exports(again) == before


# --- shared libraries ---


def test_libraries_are_read_with_spaces_in_their_paths():
    maps = """\
7f00-7f01 r-xp 00000000 08:01 1                          /my lib/libgomp.so.1
7f01-7f02 rw-p 00000000 08:01 1                          /my lib/libgomp.so.1
7f02-7f03 rw-p 00000000 00:00 0                          [heap]
7f03-7f04 r--p 00000000 08:01 1                          /usr/bin/python3
"""
    assert libraries_in(maps) == ("/my lib/libgomp.so.1",)


def test_environment_of_python_is_searched_before_the_system(tmp_path, library):
    prefix = library("lib/libiomp5.so", tmp_path / "prefix")
    conda = library("lib/libjemalloc.so.2", tmp_path / "conda")
    path = library("libtcmalloc.so.4", tmp_path / "path")
    for name in ("libiomp5.so", "libjemalloc.so.2", "libtcmalloc.so.4", "libmimalloc.so.2"):
        library(f"usr/lib/x86_64-linux-gnu/{name}")
    environ = {"CONDA_PREFIX": str(tmp_path / "conda"), "LD_LIBRARY_PATH": f":{tmp_path / 'path'}"}

    def found(stem):
        return find_library(stem, environ, str(tmp_path / "prefix"), tmp_path / "root")

    assert found("libiomp5") == str(prefix)
    assert found("libjemalloc") == str(conda)
    assert found("libtcmalloc") == str(path)
    assert found("libmimalloc").endswith("root/usr/lib/x86_64-linux-gnu/libmimalloc.so.2")
    assert found("libother") is None


def test_link_without_a_version_is_preferred_and_names_that_ld_preload_cannot_hold_are_left(tmp_path, library):
    for name in ("libjemalloc.so.2", "libjemalloc.so", "libjemalloc_pic.so", "libjemalloc.so.bak", "libjemalloc.a"):
        library(f"usr/lib/{name}")
    library("lib/libjemalloc.so", tmp_path / "a prefix")
    assert find_library("libjemalloc", {}, str(tmp_path), tmp_path / "root").endswith("/libjemalloc.so")
    assert find_library("libjemalloc", {}, str(tmp_path / "a prefix"), tmp_path / "none") is None


@pytest.mark.parametrize("value", [".", "lib", "deep/lib", "./"])
def test_libraries_by_relative_paths_are_left_out(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / value, tmp_path / value / "lib"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "libjemalloc.so").touch()
    for name in ("CONDA_PREFIX", "LD_LIBRARY_PATH"):
        assert find_library("libjemalloc", {name: value}, str(tmp_path / "prefix"), tmp_path / "root") is None
