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


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """The modules of the user's project, imported in this process."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, FILES)
    importlib.invalidate_caches()
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name)


@pytest.fixture
def send(modules, tmp_path):
    """Send an object made from the modules to workers."""

    def sent(make):
        (tmp_path / "sent").mkdir()
        dump(make(modules), tmp_path / "sent", {})

    return sent


CHANGED = {
    "a function": ("edited_function.py", "def scaled(x):\n    return x + 2\n", lambda m: m["edited_function"].scaled),
    "a default": (
        "edited_function.py",
        "def scaled(x, y=1):\n    return x * 2\n",
        lambda m: m["edited_function"].scaled,
    ),
    "a file that is being edited": (
        "edited_function.py",
        "def scaled(x):\n    return x * 2 +\n",
        lambda m: m["edited_function"].scaled,
    ),
    "a function that another one calls": (
        "edited_function.py",
        "def scaled(x):\n    return x + 2\n",
        lambda m: m["calling"].scaled,
    ),
    "a method of the base of an argument's class": (
        "edited_package/layers.py",
        FILES["edited_package/layers.py"].replace("5", "6"),
        lambda m: m["deriving"].Deep(),
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_code_that_has_changed_is_an_error(send, tmp_path, name):
    file, text, make = CHANGED[name]
    write(tmp_path, {file: text})
    with pytest.raises(NanoError, match=rf"{file} has changed since it was imported: .*Restart the program"):
        send(make)


UNCHANGED = {
    "nothing": ({}, lambda m: m["calling"].scaled),
    "a comment behind": (
        {"edited_function.py": FILES["edited_function.py"] + "# the end\n"},
        lambda m: m["calling"].scaled,
    ),
    "one more function": (
        {"edited_function.py": FILES["edited_function.py"] + "\ndef another(x):\n    return x\n"},
        lambda m: m["calling"].scaled,
    ),
    "a constant, which workers are given": (
        {"edited_constant.py": FILES["edited_constant.py"].replace("3", "4")},
        lambda m: m["edited_constant"].scaled,
    ),
    "a module that the call does not reach": (
        {"edited_package/layers.py": "class Layer:\n    pass\n"},
        lambda m: m["calling"].scaled,
    ),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_changes_are_none(send, tmp_path, name):
    files, make = UNCHANGED[name]
    write(tmp_path, files)
    send(make)


def test_a_module_that_was_reloaded_is_as_its_file(modules, send, tmp_path):
    write(tmp_path, {"edited_function.py": "def scaled(x):\n    return x + 2\n"})
    importlib.reload(modules["edited_function"])
    send(lambda modules: modules["calling"].scaled)


def test_a_file_that_is_replaced_by_one_with_an_older_date_has_changed(send, tmp_path):
    other = tmp_path / "other.py"
    other.write_text("def scaled(x):\n    return x + 2\n")
    os.utime(other, (1e9, 1e9))
    other.replace(tmp_path / "edited_function.py")
    with pytest.raises(NanoError, match="has changed"):
        send(lambda modules: modules["edited_function"].scaled)
