"""Inspection of a machine, from recorded files, from the live one, and by calls of compilers."""

import json
import os
import platform
from types import SimpleNamespace

import pytest

from nano_loop.cli import inspected as module
from nano_loop.cli.inspected import (
    CacheFolder,
    Kernels,
    Memory,
    inspect_cache,
    inspect_kernels,
    inspect_system,
)
from nano_loop.cli.main import main
from nano_loop.kernels import compiler
from nano_loop.kernels.compiler import LEVELS, NATIVE, library_name

V3 = next(level for level in LEVELS if level.name == "v3")
AVX2 = V3.instruction_sets
OUTPUT = "some-cc: fatal error: cannot execute 'as'\ncompilation terminated.\n"


def test_smallest_limit_of_the_cgroups_above_counts_in_both_versions(inspect):
    version_1 = {
        "/proc/self/cgroup": "4:memory:/docker/ab12\n",
        "/proc/self/mountinfo": "35 31 0:32 /docker/ab12 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
    }
    folder = "/sys/fs/cgroup/system.slice"
    limits = {f"{folder}/memory.max": "1073741824\n", f"{folder}/training.service/memory.max": "2147483648\n"}
    for files in (version_1, limits):
        assert inspect(files=files).memory.limit == 1 << 30


def test_machine_without_files_is_unknown_and_raises_nothing(tmp_path):
    inspected = inspect_system(tmp_path, {})
    assert inspected.memory == Memory()


def test_size_of_shared_memory_is_that_of_its_file_system(monkeypatch, tmp_path):
    sizes = dict.fromkeys(("f_frsize", "f_blocks"), 1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**sizes, f_flag=0))
    monkeypatch.setattr(module, "SHARED_MEMORY", str(tmp_path))
    assert inspect_system().memory.shared == 1 << 40
    monkeypatch.setattr(module, "SHARED_MEMORY", str(tmp_path / "none"))
    assert inspect_system().memory.shared is None


# --- kernels ---


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """Make the C compiler fail, with empty package and cache folders; return the compiler."""
    program = tmp_path / "some-cc"
    program.write_text(f"#!/bin/sh\nprintf '%s' \"{OUTPUT}\" >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CC", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "package")
    return program


def test_libraries_of_the_package_need_no_compiler(failing, monkeypatch, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    library = package / library_name("openmp", V3)
    library.write_bytes(compiler._HEADER.pack(compiler._ELF, compiler._ELF_MACHINES[platform.machine()], 0, 0, 0, 0, 0))
    assert inspect_kernels({}, AVX2) == Kernels("v3", "in the package")
    other = package / library_name("norms", V3)
    other.touch()
    assert inspect_kernels({}, AVX2) == Kernels(
        "v3", "in the package", f"{other.name} is not a library for {platform.machine()}"
    )


def test_what_is_in_the_cache_folder_needs_no_compiler(failing, monkeypatch, tmp_path):
    folder = tmp_path / "cache/nano_loop"
    assert inspect_kernels({}, ()).level is None
    assert not folder.exists()
    folder.mkdir(parents=True)
    (folder / library_name("openmp", NATIVE)).touch()
    assert inspect_kernels({}, ()) == Kernels("compile", "in the cache folder")


def test_compiler_that_works_is_named_and_nothing_is_kept(failing, monkeypatch, tmp_path):
    monkeypatch.delenv("CC")
    kernels = inspect_kernels({"NANO_LOOP_KERNELS": "compile"}, AVX2)
    assert kernels == Kernels("compile", f"compiled at first use, by {compiler.compiler_command()[0]}")
    assert not (tmp_path / "cache").exists()


def test_choices_are_those_of_a_run(failing):
    assert inspect_kernels({"NANO_LOOP_KERNELS": "off"}, AVX2) == Kernels(None, reason="NANO_LOOP_KERNELS=off")
    assert "the CPU has no" in inspect_kernels({"NANO_LOOP_KERNELS": "v4"}, AVX2).reason
    assert inspect_kernels({"NANO_LOOP_KERNELS": "avx2"}, AVX2) is None


def test_doctor_shows_the_cause_and_all_that_the_compiler_has_printed(failing, monkeypatch, capsys):
    monkeypatch.setenv("NANO_LOOP_KERNELS", "compile")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    cause = f"{failing} failed: some-cc: fatal error: cannot execute 'as'"
    assert f"kernels in C   none: {cause}\n" in text
    assert "  | some-cc: fatal error: cannot execute 'as'\n  | compilation terminated.\n" in text
    assert f"no-kernels: there are no kernels in C: {cause}\n" in text
    assert "%" in text.partition("no-kernels")[2]
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["facts"]["kernels"] == {
        "level": None,
        "origin": "",
        "reason": cause,
        "output": OUTPUT,
    }


# --- the cache folder ---


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_folder_that_is_not_there_yet_is_not_made(home):
    assert inspect_cache() == CacheFolder(str(home / "cache/nano_loop"), True, True, is_there=False)
    assert [*home.iterdir()] == []


def test_folder_that_others_may_write_to_is_not_for_this_user_alone(home):
    folder = home / "cache/nano_loop"
    folder.mkdir(parents=True, mode=0o700)
    assert inspect_cache().is_writable
    folder.chmod(0o777)
    assert not inspect_cache().is_writable


def test_read_only_and_noexec_file_systems_and_users_without_a_home_are_found(home, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a read-only file system, even for root
    assert not inspect_cache().is_writable
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*[0] * 8, os.ST_NOEXEC, 255)))
    assert not inspect_cache().is_executable
    monkeypatch.setattr(module, "cache_path", lambda: None)
    assert inspect_cache() == CacheFolder("", False, True)
