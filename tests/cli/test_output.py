"""JSON of one shape, and colour on terminals alone."""

import json
import sys

import pytest

from nano_loop.cli.output import print_json, styled


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_json_says_its_version_and_command_first(capsys):
    print_json("doctor", more=[1, None])
    found = json.loads(capsys.readouterr().out)
    assert [*found.items()] == [("version", 1), ("command", "doctor"), ("more", [1, None])]


@pytest.mark.usefixtures("terminal")
def test_terminal_has_colour():
    assert styled("hurts", fg="red") == "\x1b[31mhurts\x1b[0m"


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_user_who_wants_no_colour_has_none(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert styled("hurts", fg="red") == "hurts"


def test_file_has_no_colour():
    assert styled("hurts", fg="red") == "hurts"
