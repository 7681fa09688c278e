"""Lines of each shell: quoting by its rules, and read back by the shells that are installed."""

import os
import re
import shutil
import subprocess

import pytest

from nano_loop.cli.shells import SHELLS, lines_for, shell_of

HERE = [name for name in ("bash", "dash", "zsh", "fish") if shutil.which(name)]
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


def test_bash_is_there():
    assert "bash" in HERE


@pytest.mark.parametrize("shell", HERE)
def test_installed_shell_reads_back_every_byte(shell):
    name = shell if shell in SHELLS else "bash"
    lines = lines_for(name, {**NASTY, "GONE": None, "NEVER": None})
    environ = {"PATH": os.environ["PATH"], "GONE": "here"}
    command = [shell, "-c", os.fsdecode(lines) + "\nenv -0"]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=True)
    pairs = dict(os.fsdecode(each).split("=", 1) for each in done.stdout.split(b"\0") if each)
    assert {each: pairs.get(each) for each in NASTY} == NASTY
    assert not {"GONE", "NEVER"} & {*pairs}
    assert done.stderr == b""


def read_posix(text):
    """Read one word by the rules of POSIX: single quotes have no escapes, and a backslash outside has one."""
    parts = re.findall(r"'([^']*)'|\\(.)", text, flags=re.DOTALL)
    assert re.fullmatch(r"(?:'[^']*'|\\.)+", text, flags=re.DOTALL)
    return "".join(quoted or escaped for quoted, escaped in parts)


def read_fish(text):
    """Read one word by the rules of fish: in single quotes, a backslash escapes a quote and a backslash."""
    found = re.fullmatch(r"'((?:[^'\\]|\\.)*)'", text, flags=re.DOTALL)
    assert found
    return re.sub(r"\\(['\\])", r"\1", found[1])


def read_powershell(text):
    """Read one string by the rules of PowerShell: five characters are single quotes, and two in a row are one."""
    quotes = "'\u2018\u2019\u201a\u201b"
    found = re.fullmatch(f"'((?:[^{quotes}]|[{quotes}]{{2}})*)'", text, flags=re.DOTALL)
    assert found
    return re.sub(f"([{quotes}])[{quotes}]", r"\1", found[1])


READERS = {
    "bash": ("export {}=", read_posix),
    "zsh": ("export {}=", read_posix),
    "fish": ("set -gx {} ", read_fish),
    "powershell": ("$env:{} = ", read_powershell),
}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", NASTY)
def test_value_is_quoted_by_the_rules_of_the_shell(shell, name):
    begin, read = READERS[shell]
    line = os.fsdecode(lines_for(shell, {name: NASTY[name]}))
    assert line.endswith("\n")
    assert line.startswith(begin.format(name))
    assert read(line[len(begin.format(name)) : -1]) == NASTY[name]


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("bash", "unset A"),
        ("zsh", "unset A"),
        ("fish", "set -e A"),
        ("powershell", "Remove-Item -ErrorAction SilentlyContinue Env:A"),
    ],
)
def test_variable_is_unset(shell, line):
    assert lines_for(shell, {"A": None}) == f"{line}\n".encode()


@pytest.mark.parametrize(
    ("path", "shell"),
    [
        ("/bin/bash", "bash"),
        ("/usr/bin/zsh", "zsh"),
        ("/intel/bin/fish", "fish"),
        ("/usr/bin/pwsh", "powershell"),
        ("/bin/dash", "bash"),
        ("/bin/tcsh", "bash"),
        ("", "bash"),
    ],
)
def test_shell_is_known_by_its_path(path, shell):
    assert shell_of({"SHELL": path}) == shell


def test_unknown_shell_is_bash():
    assert shell_of({}) == "bash"
