"""The entry point: the console script, the module, and a Python without click."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

from nano_loop.cli import main as entry
from nano_loop.cli.main import main
from nano_loop.version import __version__


def test_console_script_and_module_are_the_same_program():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="nano-loop")
    assert script.load() is main
    command = [sys.executable, "-W", "error", "-m", "nano_loop", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"nano-loop {__version__}\n", "")


def test_arguments_are_those_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nano-loop", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"nano-loop {__version__}\n"


def test_python_without_click_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(entry.importlib.util, "find_spec", lambda name: None)
    assert main(["env"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert 'pip install "nano-loop[cli]"' in err


def test_doctor_needs_neither_click_nor_torch():
    program = (
        "import sys\nfor name in ('click', 'torch', 'packaging'): sys.modules[name] = None\n"
        "from nano_loop.cli.main import main\nsys.exit(main(['doctor', '--json']))"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode in (0, 1), done.stderr) == (True, "")
    found = json.loads(done.stdout)
    assert (found["command"], found["version"]) == ("doctor", 1)
    assert found["facts"]["cpu"]["cores"] >= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frob"], "No such command 'frob'"),
        (["--frob"], "No such option"),
        (["doctor", "--frob"], "`nano-loop doctor --help`"),
        (["doctor", "frob"], "frob"),
    ],
    ids=str,
)
def test_bad_input_is_refused_in_one_line(arguments, words, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nano-loop: ")
    assert err.count("\n") == 1
    assert words in err


def test_torch_that_cannot_be_imported_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "torch.py").write_text("raise ImportError('no such luck')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["doctor", "--torch"]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "--torch: torch cannot be imported (ImportError: no such luck). Leave --torch out" in err
