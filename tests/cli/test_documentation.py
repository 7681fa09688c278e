"""docs/cli.md names every finding with its kind, and every command."""

import ast
import re
from pathlib import Path

from nano_loop.cli import checks, software_checks
from nano_loop.cli.app import app

TEXT = (Path(__file__).parents[2] / "docs/cli.md").read_text(encoding="utf-8")


def kinds_in_the_code():
    """Return for each name of a finding whether it hurts. A name that is put together has a star."""
    kinds = {}
    for module in (checks, software_checks):
        for call in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "Finding":
                name = re.sub(r"^f'{.*}|'", "*", ast.unparse(call.args[0])).strip("*")
                flags = [ast.unparse(each.value) for each in call.keywords if each.arg == "hurts"]
                kinds[name] = {(): True, ("False",): False}.get(tuple(flags))  # None: it depends
    return kinds


def kinds_in_the_table():
    rows = re.findall(r"^\| (`[\w-]+`.*?) \| (hurts|note|\*) \|", TEXT, flags=re.MULTILINE)
    kinds = {
        name: {"hurts": True, "note": False}.get(kind)
        for names, kind in rows
        for name in re.findall(r"`([\w-]+)`", names)
    }
    return {name.removeprefix("omp-num-threads"): hurts for name, hurts in kinds.items()}


def test_every_finding_is_in_the_table_with_its_kind():
    assert len(kinds_in_the_code()) > 15
    assert kinds_in_the_table() == kinds_in_the_code()


def test_every_command_has_a_section():
    assert {*re.findall(r"^## (\w+)$", TEXT, flags=re.MULTILINE)} == {*app.commands}
