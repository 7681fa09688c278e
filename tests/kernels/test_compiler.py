"""C files compile, libraries are named after their inputs, and errors of the compiler are quoted."""

import ctypes
import functools
import math
import platform
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from nano_loop.config.environment import kernels_choice
from nano_loop.kernels import compiler
from nano_loop.kernels.compiler import LEVELS, NATIVE, UnavailableError, chosen_level, library_name

X86_64, ARM = ([level for level in LEVELS if level.machine == machine] for machine in ("x86_64", "aarch64"))
SOURCES = sorted(compiler.SOURCES.glob("*.c"))
HASWELL = {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm", "avx"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
ZEN_4 = SKYLAKE | {"avx512_bf16", "avx512_vnni"}


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Return a function that creates a program that replaces the C compiler."""

    def make(script):
        program = tmp_path / "some-cc"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("CC", str(program))
        return program

    return make


@pytest.fixture
def short_sources(monkeypatch, tmp_path):
    """Replace the C files by one short file with a header, without prebuilt libraries; return their folder."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "short.c").write_text('#include "one.h"\nint one(void) { return ONE; }\n')
    (folder / "one.h").write_text("#define ONE 1\n")
    monkeypatch.setattr(compiler, "SOURCES", folder)
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "none")
    return folder


# --- sources ---


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=source.stem, marks=[pytest.mark.slow] * (source.stem != "norms"))
        for source in SOURCES
        if "omp parallel" in source.read_text()
    ],
)
def test_no_file_compiles_where_directives_are_ignored(source, monkeypatch, tmp_path):
    """clang ignores them with ``-fopenmp=libgomp``."""
    monkeypatch.setattr(compiler, "_PARALLEL", ())
    with pytest.raises(UnavailableError, match=r"failed: .*ignores the directives of OpenMP.* one thread"):
        compiler.compile_library(source.stem, NATIVE, tmp_path / "any.so")


def test_logarithm_has_the_error_of_a_double(tmp_path):
    source, library = tmp_path / "log.c", tmp_path / "log.so"
    source.write_text('#include "logarithm.h"\ndouble compute(double x) { return logarithm(x); }\n')
    command = [*compiler.compiler_command(), "-O3", "-shared", "-fPIC", f"-I{compiler.SOURCES}"]
    subprocess.run([*command, "-o", library, source], check=True)
    compute = ctypes.CDLL(str(library)).compute
    compute.restype, compute.argtypes = ctypes.c_double, [ctypes.c_double]
    numbers = [1 + 1.37**n * 2**-52 for n in range(1, 2250)]
    assert max(numbers) > 1e290
    assert all(math.isclose(compute(x), math.log(x), rel_tol=1e-15) for x in numbers)
    assert compute(1.0) == 0
    assert compute(0.0) == -math.inf
    assert compute(math.inf) == math.inf
    assert math.isnan(compute(math.nan))


# --- levels ---


def test_levels_are_the_choices_of_the_variable():
    names = [level.name for level in (*LEVELS, NATIVE)]
    assert [kernels_choice({"NANO_LOOP_KERNELS": name}) for name in [*names, compiler.OFF]] == [*names, compiler.OFF]


@pytest.mark.parametrize(
    ("instruction_sets", "name"),
    [
        (ZEN_4, "bf16"),
        (SKYLAKE, "v4"),
        (HASWELL, "v3"),
        ({"sse4_2"}, "compile"),
        ({"asimd", "sve", "bf16"}, "sve"),
        ({"asimd", "bf16"}, "neon"),
        ((), "compile"),
    ],
)
def test_best_level_of_a_cpu_is_taken_if_the_package_has_it(monkeypatch, tmp_path, instruction_sets, name):
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path)
    assert chosen_level(None, instruction_sets) is NATIVE
    for level in LEVELS:
        (tmp_path / library_name("openmp", level)).touch()
    assert chosen_level(None, instruction_sets).name == name


def test_choice_of_the_user_is_taken_if_the_cpu_has_it():
    assert chosen_level("v3", ZEN_4).name == "v3"
    assert chosen_level("compile", ZEN_4) is NATIVE
    with pytest.raises(UnavailableError, match="the CPU has no avx512_bf16, which NANO_LOOP_KERNELS=bf16 needs"):
        chosen_level("bf16", SKYLAKE)
    with pytest.raises(UnavailableError, match="NANO_LOOP_KERNELS=off"):
        chosen_level("off", ZEN_4)


# --- names ---


def test_library_is_named_by_sources_and_flags_and_not_by_the_compiler(short_sources, made, monkeypatch):
    levels = (*LEVELS, NATIVE)
    before = [library_name("short", level) for level in levels]
    assert len({*before}) == len(levels)
    made("exit 1")
    monkeypatch.setenv("PATH", "/nowhere")
    assert [library_name("short", level) for level in levels] == before
    monkeypatch.setattr(compiler, "_processor", lambda: "another")
    assert [library_name("short", level) for level in levels][:-1] == before[:-1]
    assert library_name("short", NATIVE) != before[-1]
    (short_sources / "one.h").write_text("#define ONE 2\n")
    assert not {library_name("short", level) for level in levels} & {*before}


# --- installation ---

BY_SETUP = runpy.run_path(str(Path(__file__).parents[2] / "scripts/compile_levels.py"))
compile_levels = functools.partial(BY_SETUP["compile_levels"], compiler)
FOR_WHEELS = pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels here are those of x86-64")


@FOR_WHEELS
def test_levels_are_compiled_once_and_others_are_removed(short_sources, made, monkeypatch, tmp_path):
    folder = tmp_path / "prebuilt"
    libraries = compile_levels(folder)
    assert {library.name for library in libraries} == {library_name("short", level) for level in X86_64}
    assert {*folder.iterdir()} == {*libraries}
    assert ctypes.CDLL(str(folder / library_name("short", X86_64[-1]))).one() == 1
    made(f'echo "$@" >> {tmp_path}/calls; exec {shutil.which("gcc")} "$@"')
    assert compile_levels(folder) == libraries
    monkeypatch.setattr(compiler, "PREBUILT", folder)
    assert len(compile_levels(tmp_path / "build")) == len(libraries)
    assert not (tmp_path / "calls").exists()
    (short_sources / "one.h").write_text("#define ONE 2\n")
    assert not {*compile_levels(folder)} & {*libraries}
    assert not any(library.exists() for library in libraries)


def test_levels_are_those_of_the_machine_that_is_built_for(short_sources, made, monkeypatch, tmp_path):
    made('while [ "$1" != -o ]; do shift; done; echo "$@" > "$2"')
    for platform_, levels in (("linux-aarch64", ARM), ("linux-x86_64", X86_64)):
        monkeypatch.setenv("_PYTHON_HOST_PLATFORM", platform_)  # as when wheels are built for another machine
        found = compile_levels(tmp_path / platform_)
        assert {library.name for library in found} == {library_name("short", level) for level in levels}
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "macosx-14.0-arm64")
    with pytest.raises(UnavailableError, match="built for Linux on x86-64 and ARM only"):
        compile_levels(tmp_path / "none")


@FOR_WHEELS
def test_what_cannot_build_all_levels_builds_none(short_sources, made, tmp_path):
    for script, words in (
        ("echo clang version 19.1.1", "is clang, whose OpenMP is not torch's"),
        ("echo \"some-cc: error: bad value ('x86-64-v4') for '-march=' switch\" >&2; exit 1", "bad value"),
    ):
        made(script)
        with pytest.raises(UnavailableError, match=words):
            compile_levels(tmp_path / "prebuilt")


# --- messages ---

MESSAGES = {
    "an assembler that is missing": (
        "gcc: fatal error: cannot execute 'as': execvp: No such file or directory\ncompilation terminated.\n",
        "gcc: fatal error: cannot execute 'as': execvp: No such file or directory",
    ),
    "a header that is missing": (
        "In file included from a.c:9:\n/usr/include/stdint.h:1:10: fatal error: bits/x.h: No such file or directory\n"
        "    1 | #include <bits/x.h>\n      |          ^~~~~~~~\ncompilation terminated.\n",
        "/usr/include/stdint.h:1:10: fatal error: bits/x.h: No such file or directory",
    ),
    "a library that is missing": (
        "/usr/bin/ld: cannot find -lm: No such file or directory\ncollect2: error: ld returned 1 exit status\n",
        "/usr/bin/ld: cannot find -lm: No such file or directory",
    ),
    "a warning before": (
        "a.c:1:5: warning: unused variable\na.c:3:1: error: expected ';'\na.c:4:1: error: unknown type\n",
        "a.c:3:1: error: expected ';'",
    ),
    "another language": ("no room\n", "no room"),
    "nothing": ("", "no message"),
}


@pytest.mark.parametrize(("output", "cause"), MESSAGES.values(), ids=MESSAGES)
def test_failing_compiler_is_quoted_with_the_cause_and_has_all_it_printed(made, tmp_path, output, cause):
    text = tmp_path / "text"
    text.write_text(output)
    program = made(f"cat {text} >&2; exit 1")
    with pytest.raises(UnavailableError) as caught:
        compiler.compile_library("openmp", NATIVE, tmp_path / "openmp.so")
    assert str(caught.value) == f"{program} failed: {cause}"
    assert caught.value.output == output
