"""A module that was edited since its import: workers compute by the code of the caller."""

import importlib
import os
import sys
import threading

import pytest
import torch

import nano_loop
from nano_loop import NanoWorkerError, nano
from nano_loop.distributed.payload.edited_modules import send_edited_modules

NAMES = ("edited_function", "edited_constant", "edited_package", "edited_package.layers", "importer", "decorated")
BEFORE = {
    "edited_function.py": "def scaled(x):\n    return x * 2\n",
    "edited_constant.py": "FACTOR = 3\n\ndef scaled(x):\n    return x * FACTOR\n",
    "edited_package/__init__.py": "",
    "edited_package/layers.py": "class Layer:\n    @staticmethod\n    def scaled(x):\n        return x * 5\n",
    "importer.py": "from edited_package.layers import Layer\n\nclass Deep(Layer):\n    pass\n",
    "decorated.py": "import functools\n\nseen, count = [], 0\nlast = None\n\n@functools.cache\ndef note():\n"
    "    global last\n    last = len(seen)\n    seen.append(last)\n",
}
AFTER = {
    "edited_function.py": "# a line more\ndef scaled(x):\n    return x + 2\n",
    "edited_constant.py": "FACTOR = 4\n\ndef scaled(x):\n    return x * FACTOR\n",
    "edited_package/layers.py": "class Layer:\n    @staticmethod\n    def scaled(x):\n        return x * 6\n",
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules of the user's project, imported by this process."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, BEFORE)
    importlib.invalidate_caches()
    imported = {name: importlib.import_module(name) for name in NAMES}
    imported["decorated"].note()  # variables that a module itself writes are no edit
    yield imported
    for name in NAMES:
        sys.modules.pop(name)


def sent(folder):
    """Return whether modules are sent."""
    send_edited_modules(folder / "sent")
    return (folder / "sent").exists()


def test_all_ranks_compute_by_the_code_that_the_caller_has_imported(modules, tmp_path):
    """A function, a constant, and a method of a class that a module imports which itself is as it was."""
    write(tmp_path, AFTER)
    scales = [modules[name].scaled for name in ("edited_function", "edited_constant")]
    deep = modules["importer"].Deep()

    @nano(num_processes=2, verbose=False, timeout=60)
    def train(model, optimizer, scales, deep):
        import edited_constant
        import importer

        y = torch.ones(1)
        for scaled in (*scales, deep.scaled, importer.Deep.scaled, edited_constant.scaled):
            y = scaled(y)
        assert isinstance(deep, importer.Layer)
        return nano_loop.all_gather(y).flatten().tolist()

    model = torch.nn.Linear(1, 1)
    assert train(model, torch.optim.SGD(model.parameters(), 0.1), scales, deep) == [2 * 3 * 5 * 5 * 3] * 2


@pytest.mark.parametrize(
    ("edit", "is_sent"),
    [
        ({}, False),
        ({"edited_function.py": "\n\n# only comments and lines\ndef scaled(x):\n    return x * 2\n"}, False),
        ({"edited_function.py": "def scaled(x):\n    return x * 2\n\ndef another(x):\n    return x\n"}, False),
        ({"edited_function.py": "def scaled(x, y=1):\n    return x * 2\n"}, True),
        ({"edited_function.py": "def scaled(x):\n    return x * 2 +\n"}, True),
        ({"edited_constant.py": AFTER["edited_constant.py"]}, True),
        ({"edited_package/layers.py": AFTER["edited_package/layers.py"]}, True),
    ],
)
def test_what_is_sent(modules, tmp_path, edit, is_sent):
    write(tmp_path, edit)
    assert sent(tmp_path) == is_sent


def test_a_file_that_is_replaced_by_one_with_an_older_date_is_edited(modules, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(AFTER["edited_function.py"])
    os.utime(other, (1e9, 1e9))
    other.replace(tmp_path / "edited_function.py")
    assert sent(tmp_path)


def test_a_module_that_cannot_be_sent_is_named(modules, tmp_path):
    modules["edited_function"].held = threading.Lock()
    write(tmp_path, AFTER)
    model = torch.nn.Linear(1, 1)
    train = nano(num_processes=2, verbose=False, timeout=60)(lambda model, optimizer: None)
    with pytest.raises(NanoWorkerError, match=r"edited_function.*edited on disk") as caught:
        train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert caught.value.rank == 0
