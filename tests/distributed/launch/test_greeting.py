"""Creating a process group prints nothing, and swallows no output of others."""

import os
import subprocess
import sys

import pytest
import torch

from nano_loop.distributed.launch import group


@pytest.mark.parametrize("torch_version", ["2.8.0+cu128", "2.12.1"])
def test_greeting_is_left_out_and_all_else_is_printed(monkeypatch, capfd, torch_version):
    monkeypatch.setattr(torch, "__version__", torch_version)
    descriptors = set(os.listdir("/proc/self/fd"))
    with group.without_greeting():
        os.write(1, b"before\n[Gloo] Rank 0 is connected to 1 peer ranks.\nafter")
    os.write(1, b", and at once\n")
    assert capfd.readouterr().out == "before\nafter, and at once\n"
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_output_is_back_where_ranks_do_not_meet(monkeypatch, capfd):
    monkeypatch.setattr(torch, "__version__", "2.8.0")

    def fail():
        with group.without_greeting():
            os.write(1, b"said before\n")
            raise TimeoutError

    with pytest.raises(TimeoutError):
        fail()
    os.write(1, b"said after\n")
    assert capfd.readouterr().out == "said before\nsaid after\n"


def test_a_torch_that_does_not_greet_is_left_alone(monkeypatch, capfd):
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with group.without_greeting():
        os.write(1, b"[Gloo] who else would say so\n")
    assert capfd.readouterr().out == "[Gloo] who else would say so\n"


@pytest.mark.slow
def test_closed_standard_output_is_no_obstacle():
    script = """
        import os
        import torch
        from nano_loop.distributed.launch import group
        torch.__version__ = "2.8.0"
        os.close(1)
        with group.without_greeting():
            pass
    """
    command = [sys.executable, "-c", script.replace("\n        ", "\n")]
    assert subprocess.run(command, timeout=60).returncode == 0
