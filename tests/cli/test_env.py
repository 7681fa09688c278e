"""`nano-loop env` in real shells: what it exports, and that `--undo` restores the environment byte for byte."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nano_loop.cli.main import main
from nano_loop.cli.output import SHAPE
from nano_loop.config.exports import EXPORTS, Exports
from nano_loop.cpu.glibc import SETTINGS_AS_VARIABLES, is_glibc, libraries_in

PROGRAMS = Path(sys.executable).parent
EVAL, INIT = 'eval "$(nano-loop env {})"', ". nano-loop-init {}"
# dash passes no arguments to a script that it sources.
EVERY_WAY = (("bash", EVAL), ("bash", INIT), ("zsh", EVAL), ("zsh", INIT), ("dash", EVAL))
WAYS = [each for each in EVERY_WAY if shutil.which(each[0])]


def environment(**variables):
    """Return a small environment in which the shells find nano-loop."""
    return {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "HOME": "/", **variables}


def environments_after(shell, steps, environ):
    """Return the environment after each step, as a shell's child has it, and what was printed on standard error."""
    script = "".join(f"{step}\nenv -0; printf '=\\0'\n" for step in ["true", *steps])
    command = [shell, "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=100, check=True)
    found = []
    for part in done.stdout.split(b"\0=\0")[:-1]:
        pairs = (each.split(b"=", 1) for each in part.split(b"\0"))
        found.append({name: value for name, value in pairs if name not in (b"_", b"SHLVL")})
    return found, done.stderr.decode()


@pytest.fixture
def jemalloc(tmp_path):
    """Give the folder of an environment that has a library of the name of jemalloc."""
    own = libraries_in(Path("/proc/self/maps").read_text())
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libjemalloc.so").symlink_to(next(each for each in own if Path(each).name.startswith("libm.so")))
    return tmp_path


@pytest.mark.parametrize(("shell", "way"), WAYS)
def test_undo_restores_the_environment_byte_for_byte(shell, way, jemalloc):
    odd = {"LD_PRELOAD": " libc.so.6:", "MALLOC_CONF": "", "MINE": ' a\'b\n"c" \\ é\udc80'}
    environ = environment(CONDA_PREFIX=str(jemalloc), **odd)
    steps = [way.format(""), way.format("--jemalloc"), way.format("--undo"), way.format("--undo")]
    (before, plain, preloading, undone, again), err = environments_after(shell, steps, environ)
    assert plain[b"OMP_NUM_THREADS"].isdigit()
    assert preloading[b"LD_PRELOAD"].endswith(b"/libjemalloc.so: libc.so.6:")
    assert preloading[b"MALLOC_CONF"] == b""
    assert before == undone == again
    assert err.splitlines() == [
        "nano-loop: MALLOC_CONF= is set, and stays. To replace it, unset it first.",
        "nano-loop: there is nothing to undo in this shell.",
    ]


@pytest.mark.parametrize(("shell", "way"), WAYS)
def test_library_that_is_asked_for_once_is_gone_with_the_next_call(shell, way, jemalloc):
    environ = environment(CONDA_PREFIX=str(jemalloc))
    steps = [way.format("--enable-jemalloc"), way.format(""), way.format("-u")]
    (before, preloading, plain, undone), _ = environments_after(shell, steps, environ)
    assert preloading[b"LD_PRELOAD"] == bytes(jemalloc / "lib/libjemalloc.so")
    assert b"LD_PRELOAD" not in plain
    assert plain.keys() - before.keys() >= {b"OMP_NUM_THREADS", EXPORTS.encode()}
    assert undone == before


@pytest.mark.parametrize(("shell", "way"), WAYS)
def test_bad_option_changes_nothing(shell, way):
    (before, after), err = environments_after(shell, [way.format("--frob") + " || true"], environment())
    assert before == after
    assert err == "nano-loop: No such option '--frob'. See `nano-loop env --help`.\n"


def test_script_that_is_run_and_not_sourced_says_what_to_write():
    command = [PROGRAMS / "nano-loop-init"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("Write: source nano-loop-init\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("options", ["-o -c", "--disable-openmp --disable-allocator"])
def test_options_of_bigdl_nano_are_accepted(options, capsys):
    assert main(["env", *options.split()]) == 0
    assert EXPORTS in capsys.readouterr().out


@pytest.fixture
def without(monkeypatch):
    """Take the variables away that the command reads."""
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jemalloc", "--tcmalloc"], "a process has one allocator"),
        (["--undo", "--jemalloc"], "--undo puts everything back"),
        (["--shell", "fish"], "--shell: it was removed: the lines are those of POSIX shells. Leave it out"),
    ],
    ids=str,
)
def test_bad_input_is_refused_in_one_line(without, arguments, words, capsys):
    assert main(["env", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_damaged_note_is_refused_in_one_line(without, capsys):
    without.setenv(EXPORTS, "nonsense")
    for arguments in (["env"], ["env", "--undo"]):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"nano-loop: {EXPORTS} is damaged: ")
        assert err.count("\n") == 1
