"""JSON of one shape, and colour on terminals alone."""

import json
import sys

import pytest

from nano_loop.cli.main import main
from nano_loop.cli.output import print_json


def test_json_says_its_version_and_command_first(capsys):
    print_json("doctor", more=[1, None])
    found = json.loads(capsys.readouterr().out)
    assert [*found.items()] == [("version", 2), ("command", "doctor"), ("more", [1, None])]


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
