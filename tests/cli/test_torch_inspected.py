"""What torch says of itself, in a separate process."""

import re

import pytest
import torch

from nano_loop.cli import torch_inspected
from nano_loop.cpu.glibc import libraries_in
from nano_loop.errors import NanoError


def test_torch_says_what_it_has(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('of the working folder')")
    monkeypatch.chdir(tmp_path)
    said = torch_inspected.inspect_torch()
    assert said["version"] == torch.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", said["onednn"])
    assert said["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert said["num_threads"] >= 1
    assert any("libtorch" in library for library in libraries_in(said["maps"])) == bool(said["maps"])


def test_import_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(torch_inspected, "_SECONDS", 0.1)
    monkeypatch.setattr(torch_inspected, "_PROGRAM", "import time; time.sleep(60)")
    with pytest.raises(NanoError, match=r"it took more than 0\.1 s"):
        torch_inspected.inspect_torch()


def test_process_that_ends_without_a_word_is_an_error(monkeypatch):
    monkeypatch.setattr(torch_inspected, "_PROGRAM", "import os; os._exit(3)")
    with pytest.raises(NanoError, match="exit code 3"):
        torch_inspected.inspect_torch()
