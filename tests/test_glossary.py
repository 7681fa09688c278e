"""The package's names are standard terms: none of a list of private words is used."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import nano_loop

PACKAGE = Path(nano_loop.__file__).parent
#: Words that describe a role in a sentence, or that only this package used.
OLD = frozenset(
    (
        *("each", "found", "given", "needed", "mine", "theirs", "Seat", "Parts", "Entries", "Entry", "Layer", "meet"),
        *("is_way_in", "Inside", "way", "ways", "WAY", "Way", "Ways"),
        *("Worth", "worth", "decided", "Printed", "Printer", "of_a_copy", "asked", "concerns", "see", "problem"),
        *("meanwhile", "sameness", "alike", "taken_lengths", "agreed_randomness", "noted_calls", "whereabouts"),
        *("Whereabouts", "parting", "culprit", "replicas", "meeting", "connecting", "throwaway", "lifeline", "sweep"),
        *("own_slice", "works", "nested", "division", "under_way", "commanded", "command_note", "run_note", "picture"),
        *("live", "pump", "_meet", "_bury", "_moved", "nobody_sees", "of_inputs", "of_outputs"),
    )
)


def defined(tree):
    """The names of functions, classes, parameters, variables and attributes that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def old_names(package):
    """Count the old names that each top-level folder of a package defines, including module names."""
    counts = Counter()
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).parts
        names = [*defined(ast.parse(path.read_text())), *path.relative_to(package).with_suffix("").parts]
        counts[place[0]] += sum(name in OLD or name.lstrip("_") in OLD for name in names)
    return {room: count for room, count in counts.items() if count}


def test_no_old_name_is_defined():
    assert old_names(PACKAGE) == {}


@pytest.mark.parametrize(
    "source",
    [
        "for each in x: ...",
        "def f(given): ...",
        "class Seat: ...",
        "self._found = 1",
        "import x as way",
        "[w for mine in x]",
    ],
)
def test_planted_old_name_is_found(tmp_path, source):
    (tmp_path / "room").mkdir()
    (tmp_path / "room/one.py").write_text(source)
    assert old_names(tmp_path) == {"room": 1}
    (tmp_path / "room/one.py").write_text("def f(x): ...\nfor row in x: print(each)")
    assert old_names(tmp_path) == {}
