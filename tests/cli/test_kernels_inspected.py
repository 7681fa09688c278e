"""`doctor` says which kernels in C a run would have, and shows all that a failing compiler has printed."""

import json

import pytest

from nano_loop.cli.kernels_inspected import Kernels, inspect_kernels
from nano_loop.cli.main import main
from nano_loop.kernels import compiler
from nano_loop.kernels.compiler import LEVELS, NATIVE, library_name

AVX2 = LEVELS[-1].instruction_sets
OUTPUT = "some-cc: fatal error: cannot execute 'as'\ncompilation terminated.\n"


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """Let the C compiler fail, and the package and the cache folder be empty; return the compiler."""
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
    library = package / library_name("openmp", LEVELS[-1])
    library.write_bytes(compiler._HEADER.pack(compiler._ELF, compiler._X86_64, 0, 0, 0, 0, 0))
    assert inspect_kernels({}, AVX2) == Kernels("v3", "in the package")
    other = package / library_name("norms", LEVELS[-1])
    other.touch()
    assert inspect_kernels({}, AVX2) == Kernels("v3", "in the package", f"{other.name} is no library for x86-64")


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
