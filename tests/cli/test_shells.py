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


#: Of shells that are installed in few places. zsh has the lines of bash.
READERS = {"fish": ("set -gx {} ", read_fish), "powershell": ("$env:{} = ", read_powershell)}


@pytest.mark.parametrize("shell", READERS)
@pytest.mark.parametrize("name", NASTY)
def test_value_is_quoted_by_the_rules_of_the_shell(shell, name):
    begin, read = READERS[shell]
    line = os.fsdecode(lines_for(shell, {name: NASTY[name]}))
    assert line.endswith("\n")
    assert line.startswith(begin.format(name))
    assert read(line[len(begin.format(name)) : -1]) == NASTY[name]


def test_variable_is_unset():
    lines = {"bash": "unset A", "fish": "set -e A", "powershell": "Remove-Item -ErrorAction SilentlyContinue Env:A"}
    assert {shell: lines_for(shell, {"A": None}) for shell in lines} == {
        shell: f"{line}\n".encode() for shell, line in lines.items()
    }
    assert SHELLS["zsh"] is SHELLS["bash"]


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
def test_shell_is_known_by_its_path_and_bash_otherwise(path, shell):
    assert shell_of({"SHELL": path}) == shell
    assert shell_of({}) == "bash"
