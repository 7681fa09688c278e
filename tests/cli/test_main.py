"""The entry point and its commands: help texts, JSON of one format, colors, and a Python without click."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nano_loop.cli import SHAPE
from nano_loop.cli import main as entry
from nano_loop.cli.app import app
from nano_loop.cli.main import main
from nano_loop.config.declarations import OPTIONS
from nano_loop.version import __version__


def python(program, *arguments):
    """Run Python with warnings as errors."""
    command = [sys.executable, "-W", "error", *program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_console_script_and_module_are_the_same_program():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="nano-loop")
    assert script.load() is main
    done = python(["-m", "nano_loop"], "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"nano-loop {__version__}\n", "")


def test_python_without_click_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(entry.importlib.util, "find_spec", lambda name: None)
    assert main(["env"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert 'pip install "click>=8.1"' in err


def test_doctor_needs_neither_click_nor_torch():
    program = (
        "import sys\nfor name in ('click', 'torch', 'packaging'): sys.modules[name] = None\n"
        "from nano_loop.cli.main import main\nsys.exit(main(['doctor', '--json']))"
    )
    done = python(["-c", program])
    assert (done.returncode in (0, 1), done.stderr) == (True, "")
    found = json.loads(done.stdout)
    assert (found["command"], found["version"]) == ("doctor", SHAPE)
    assert found["facts"]["cpu"]["cores"] >= 1


def test_no_arguments_show_the_commands(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in app.list_commands(None))


@pytest.mark.parametrize("name", app.list_commands(None))
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_an_example(name, flag, capsys):
    assert main([name, flag]) == 0
    out = capsys.readouterr().out
    assert "Example" in out
    assert f"nano-loop {name}" in out.partition("Example")[2]
    assert "--json" in out


@pytest.mark.parametrize("name", ["run", "tune", "profile"])
def test_options_of_nano_loop_stand_behind_those_of_the_command(name, capsys):
    main([name, "--help"])
    own, nanos = capsys.readouterr().out.split("\nOptions of nano_loop", 1)
    assert "--json" in own
    assert "--help" in own
    assert "\n  SCRIPT" not in own
    assert not {"--precision", "--tune"} & {*own.partition("\nOptions:")[2].split()}
    flags = re.findall(r"^  --(?:\[no-\])?([\w-]+)", nanos, re.MULTILINE)
    table = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").partition("\n## Options\n")[2]
    most_used = [name.replace("_", "-") for name in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)]
    assert flags[: len(most_used)] == most_used
    assert sorted(flags) == sorted(name.replace("_", "-") for name in OPTIONS if name != "worker_init")
    assert "bf16 autocast around each call" in " ".join(nanos.split())


CLOSED = {">&-": [False, True, False], "2>&-": [False, False, True], "<&-": [True, False, False]}
CLOSED |= {"<&- >&- 2>&-": [True, True, True]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [("env", 0), ("run --json -", 0), ("run ran.py", 0), ("run --precision=fp8 ran.py", 2), ("profile ran.py", 2)],
)
def test_closed_standard_stream_is_no_error(tmp_path, arguments, code):
    """They stay closed for the script, as under Python, and files opened later do not get their descriptors."""
    streams = "[stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)]"
    (tmp_path / "ran.py").write_text(f"import os, sys; os.path.exists('ran') or open('ran', 'w').write(str({streams}))")
    for closed, is_closed in CLOSED.items():
        line = f"{sys.executable} -m nano_loop {arguments} {closed}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=tmp_path, timeout=100)
        assert (done.returncode, "Traceback" in done.stderr, "nano-loop: " in done.stdout) == (code, False, False), done
        if arguments.endswith(" ran.py") and code != 2:
            assert (tmp_path / "ran").read_text() == str(is_closed)
        (tmp_path / "ran").unlink(missing_ok=True)


def test_working_folder_that_is_gone_and_a_full_disk_are_refused_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["run", "-m", "train"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    words = "nano-loop: nano-loop run: the operating system reported an error (No such file or directory). Check"
    assert line.startswith(words)


def test_no_command_waits_for_torch():
    calls = "; ".join(f"main({call})" for call in (["env"], ["run", "--json", "--precision", "bf16", "-"], ["doctor"]))
    calls += "; import nano_loop.cli.tuning.search"  # its imports would load torch
    done = python(["-c", f"import sys; from nano_loop.cli.main import main; {calls}; sys.exit('torch' in sys.modules)"])
    assert done.returncode == 0
    for words in ("NANO_LOOP_ENV_BEFORE", '"command": "run"', "\nnano_loop "):
        assert words in done.stdout


def test_ctrl_c_ends_with_the_code_of_a_shell(monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(app.commands["doctor"], "callback", interrupted)
    assert main(["doctor"]) == 130


@pytest.mark.parametrize(
    ("terminal", "variables", "has_colour"),
    [(True, {}, True), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False), (False, {}, False)],
)
def test_terminal_has_colour_unless_its_user_wants_none(monkeypatch, capsys, terminal, variables, has_colour):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    main(["doctor"])
    assert ("\x1b[1m" in capsys.readouterr().out) == has_colour
