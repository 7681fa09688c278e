"""The commands: each has a help text with an example, and the option `--json`."""

import subprocess
import sys

import pytest

from nano_loop.cli.app import app
from nano_loop.cli.main import main


def test_no_arguments_show_the_commands(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in app.commands)


@pytest.mark.parametrize("name", [*app.commands])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_an_example(name, flag, capsys):
    assert main([name, flag]) == 0
    out = capsys.readouterr().out
    assert "Example" in out
    assert f"nano-loop {name}" in out.partition("Example")[2]
    assert "--json" in out


def test_list_of_commands_shows_whole_sentences(capsys):
    main([])
    lines = capsys.readouterr().out.partition("Commands:")[2].splitlines()
    assert [line.split()[0] for line in lines if line.endswith(".")] == sorted(app.commands)
    assert not [line for line in lines if line.endswith("...")]


@pytest.mark.parametrize("name", ["run", "tune", "profile"])
def test_options_of_nano_loop_stand_behind_those_of_the_command(name, capsys):
    main([name, "--help"])
    own, nanos = capsys.readouterr().out.split("\nOptions of nano_loop", 1)
    assert "--json" in own
    assert "--help" in own
    assert "\n  SCRIPT" not in own
    assert not {"--precision", "--tune"} & {*own.partition("\nOptions:")[2].split()}
    assert {"--num-processes", "--precision", "--channels-last"} <= {*nanos.replace("/", " ").split()}


def test_no_command_waits_for_torch():
    calls = "; ".join(f"main({[*arguments]})" for arguments in (["env"], ["run", "--json", "--precision", "bf16", "-"]))
    program = f"import sys; from nano_loop.cli.main import main; {calls}; sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0
    assert "NANO_LOOP_ENV_BEFORE" in done.stdout
    assert '"command": "run"' in done.stdout


def test_ctrl_c_ends_with_the_code_of_a_shell(monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(app.commands["doctor"], "callback", interrupted)
    assert main(["doctor"]) == 130
