"""`nano-loop env` in real shells: its exports are correct, and `--undo` restores the environment byte for byte."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nano_loop.cli import SHAPE
from nano_loop.cli.main import main
from nano_loop.config.environment import EXPORTS, Exports
from nano_loop.cpu.glibc import SETTINGS_AS_VARIABLES, is_glibc, libraries_in

ROOT = Path(__file__).parents[2]
EVAL, INIT = 'eval "$(nano-loop env {})"', ". nano-loop-init {}"
# dash passes no arguments to a sourced script.
EVERY_WAY = (("bash", EVAL), ("bash", INIT), ("zsh", EVAL), ("zsh", INIT), ("dash", EVAL))
WAYS = [
    pytest.param(*way, marks=[] if way == EVERY_WAY[1] else pytest.mark.slow)
    for way in EVERY_WAY
    if shutil.which(way[0])
]


@pytest.fixture
def environ(tmp_path):
    """Return a small environment in which shells find this checkout's programs, and a fake jemalloc library."""
    programs, library = tmp_path / "bin", tmp_path / "lib/libjemalloc.so"
    programs.mkdir()
    (programs / "nano-loop-init").symlink_to(ROOT / "scripts/nano-loop-init")
    program = f"import sys; sys.path.insert(0, '{ROOT}'); from nano_loop.cli.main import main; sys.exit(main())"
    (programs / "nano-loop").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{program}" "$@"\n')
    (programs / "nano-loop").chmod(0o755)
    library.parent.mkdir()
    own = libraries_in(Path("/proc/self/maps").read_text())
    library.symlink_to(next(each for each in own if Path(each).name.startswith("libm.so")))
    return {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": "/", "CONDA_PREFIX": str(tmp_path)}


def environments_after(shell, steps, environ):
    """Return the environment of a shell's child after each step, and the output on standard error."""
    script = "".join(f"{step}\nenv -0; printf '=\\0'\n" for step in ["true", *steps])
    command = [shell, "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=100, check=True)
    found = []
    for part in done.stdout.split(b"\0=\0")[:-1]:
        pairs = (each.split(b"=", 1) for each in part.split(b"\0"))
        found.append({name: value for name, value in pairs if name not in (b"_", b"SHLVL")})
    return found, done.stderr.decode()


@pytest.mark.parametrize(("shell", "way"), WAYS)
def test_undo_restores_the_environment_byte_for_byte_and_bad_options_change_nothing(shell, way, environ):
    odd = {"LD_PRELOAD": " libc.so.6:", "MALLOC_CONF": "", "MINE": ' a\'b\n"c" \\ é\udc80'}
    steps = [way.format(options) for options in ("", "--jemalloc", "--undo", "--undo", "--frob")]
    more = [way.format(options) for options in ("--enable-jemalloc", "", "-u")]
    steps = [*steps[:-1], f"{steps[-1]} || true", "unset LD_PRELOAD MALLOC_CONF", *more]
    found, err = environments_after(shell, steps, environ | odd)
    before, plain, preloading, undone, again, refused, without, asked, asked_once, gone = found
    library = os.fsencode(environ["CONDA_PREFIX"]) + b"/lib/libjemalloc.so"
    assert plain[b"OMP_NUM_THREADS"].isdigit()
    assert preloading[b"LD_PRELOAD"] == library + b": libc.so.6:"
    assert preloading[b"MALLOC_CONF"] == b""
    assert before == undone == again == refused
    assert asked[b"LD_PRELOAD"] == library
    assert b"LD_PRELOAD" not in asked_once
    assert asked_once.keys() - without.keys() >= {b"OMP_NUM_THREADS", EXPORTS.encode()}
    assert gone == without
    assert err.splitlines() == [
        "nano-loop: MALLOC_CONF= is set, and is kept. To replace it, unset it first.",
        "nano-loop: there is nothing to undo in this shell.",
        "nano-loop: No such option '--frob'. See `nano-loop env --help`.",
    ]


def test_script_that_is_run_and_not_sourced_says_what_to_write(environ):
    done = subprocess.run(["nano-loop-init"], env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("Write: source nano-loop-init\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("options", ["-o -c", "--disable-openmp --disable-allocator"])
def test_options_of_bigdl_nano_are_accepted(options, capsys):
    assert main(["env", *options.split()]) == 0
    assert EXPORTS in capsys.readouterr().out


@pytest.fixture
def without(monkeypatch):
    for name in ("OMP_NUM_THREADS", "LD_PRELOAD", "MALLOC_CONF", "GLIBC_TUNABLES", *SETTINGS_AS_VARIABLES, EXPORTS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


NASTY = {
    "EMPTY": "",
    "SPACES": "  two  words\t ",
    "NEWLINES": "first\n\nthird\n",
    "QUOTES": "it's \"quoted\", '' and `ticked`",
    "ENDS": "'",
    "CODE": "$HOME $(id) `id` ${X} !! ~ * ; & | > # %",
    "BACKSLASHES": "\\ \\n \\' \\\\ end\\",
    "LETTERS": "é – \u2018typographic\u2019 \u201alow\u201b",
    "BYTES": "\udc80\udcff",
}


@pytest.mark.parametrize("shell", [name for name in ("bash", "dash", "zsh") if shutil.which(name)])
def test_shell_reads_back_every_byte(shell, without, capfdbinary):
    for name in (*NASTY, "GONE"):
        without.setenv(name, "1")
    before = {**NASTY, "GONE": None, "NEVER": None}
    without.setenv(EXPORTS, Exports(before, {}).encoded())
    assert main(["env", "--undo"]) == 0
    lines = capfdbinary.readouterr().out
    command = [shell, "-c", os.fsdecode(lines) + "\nenv -0"]
    environ = {"PATH": os.environ["PATH"], "GONE": "here"}
    done = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=True)
    pairs = dict(os.fsdecode(each).split("=", 1) for each in done.stdout.split(b"\0") if each)
    assert {name: pairs.get(name) for name in NASTY} == NASTY
    assert not {"GONE", "NEVER"} & {*pairs}
    assert done.stderr == b""


def test_json_has_the_changes(without, capsys):
    without.setenv("OMP_NUM_THREADS", "77")
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    changes = found.pop("changes")
    assert found == {"version": SHAPE, "command": "env", "undo": False, "kept": ["OMP_NUM_THREADS"]}
    assert {*changes} == {EXPORTS, *(SETTINGS_AS_VARIABLES if is_glibc() else ())}
    without.setenv(EXPORTS, changes[EXPORTS])
    assert main(["env", "--undo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == {EXPORTS: None}
