"""Shared libraries: by name in a process, in LD_PRELOAD, and on disk."""

import pytest

from nano_loop.cli.training_environment import find_library
from nano_loop.cpu.glibc import libraries_in


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
