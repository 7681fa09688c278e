"""Changing a module's file after its import is an error: workers would run different code."""

import importlib
import os
import sys

import pytest

from nano_loop import NanoError
from nano_loop.distributed.payload.payload import dump

FILES = {
    "edited_function.py": "def scaled(x):\n    return x * 2\n",
    "edited_constant.py": "FACTOR = 3\n\ndef scaled(x):\n    return x * FACTOR\n",
    "edited_package/__init__.py": "",
    "edited_package/layers.py": "class Layer:\n    @staticmethod\n    def scaled(x):\n        return x * 5\n",
    "deriving.py": "from edited_package.layers import Layer\n\nclass Deep(Layer):\n    pass\n",
    "calling.py": "import edited_function\n\ndef scaled(x):\n    return edited_function.scaled(x)\n",
}
NAMES = [name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in FILES]
OTHER = "def scaled(x):\n    return x + 2\n"


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Write other texts of some files after the import of all, and dump the object that `make` makes of the modules."""

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)

    def sent(files, make):
        write(files)
        (tmp_path / "sent").mkdir()
        dump(make(modules), tmp_path / "sent", {})

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    write(FILES)
    importlib.invalidate_caches()
    modules = {name: importlib.import_module(name) for name in NAMES}
    yield sent
    for name in NAMES:
        sys.modules.pop(name)


def calling(modules):
    return modules["calling"].scaled


def function(modules):
    return modules["edited_function"].scaled


CHANGED = {
    "a function": ("edited_function.py", OTHER, function),
    "a default": ("edited_function.py", "def scaled(x, y=1):\n    return x * 2\n", function),
    "a file that is being edited": ("edited_function.py", "def scaled(x):\n    return x * 2 +\n", function),
    "a function that another one calls": ("edited_function.py", OTHER, calling),
    "a method of the base of an argument's class": (
        "edited_package/layers.py",
        FILES["edited_package/layers.py"].replace("5", "6"),
        lambda m: m["deriving"].Deep(),
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_code_that_has_changed_is_an_error(edited, name):
    file, text, make = CHANGED[name]
    with pytest.raises(NanoError, match=rf"{file} has changed since it was imported: .*Restart the program"):
        edited({file: text}, make)


def reloaded(modules):
    importlib.reload(modules["edited_function"])
    return calling(modules)


UNCHANGED = {
    "nothing": ({}, calling),
    "a comment behind": ({"edited_function.py": FILES["edited_function.py"] + "# the end\n"}, calling),
    "one more function": ({"edited_function.py": FILES["edited_function.py"] + "\ndef another(x): pass\n"}, calling),
    "a constant, which workers are given": (
        {"edited_constant.py": FILES["edited_constant.py"].replace("3", "4")},
        lambda m: m["edited_constant"].scaled,
    ),
    "a module that the call does not reach": ({"edited_package/layers.py": "class Layer:\n    pass\n"}, calling),
    "a module that was reloaded": ({"edited_function.py": OTHER}, reloaded),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_changes_are_none(edited, name):
    edited(*UNCHANGED[name])


def test_a_file_that_is_replaced_by_one_with_an_older_date_has_changed(edited, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(OTHER)
    os.utime(other, (1e9, 1e9))
    other.replace(tmp_path / "edited_function.py")
    with pytest.raises(NanoError, match="has changed"):
        edited({}, function)
