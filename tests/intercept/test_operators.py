"""A kernel of torch's is replaced for a time."""

import subprocess
import sys
import textwrap

import pytest
import torch

from nano_loop.intercept.operators import overridden


def sevens(tensor, p=0.5, *, generator=None):
    return tensor.fill_(7)


def eights(tensor, p=0.5, *, generator=None):
    return tensor.fill_(8)


def drawn():
    return torch.empty(3).bernoulli_(0.5)


def is_plain():
    return drawn().max() <= 1


def test_function_stands_in_until_the_context_is_left():
    with overridden("bernoulli_.float", sevens, "CPU"):
        assert drawn().tolist() == [7, 7, 7]
    assert is_plain()


def test_kernel_is_back_after_an_exception():
    with pytest.raises(ZeroDivisionError), overridden("bernoulli_.float", sevens, "CPU"):
        raise ZeroDivisionError
    assert is_plain()


def test_overrides_may_be_nested():
    with overridden("bernoulli_.float", sevens, "CPU"):
        with overridden("bernoulli_.float", eights, "CPU"):
            assert drawn().tolist() == [8, 8, 8]
        assert drawn().tolist() == [7, 7, 7]
    assert is_plain()


def test_first_override_of_a_process_warns_of_nothing():
    script = """
        import torch
        from nano_loop.intercept.operators import overridden
        with overridden("bernoulli_.float", lambda tensor, p=0.5, *, generator=None: tensor.fill_(7), "CPU"):
            print(torch.empty(1).bernoulli_(0.5).item())
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert (run.stdout, run.stderr) == ("7.0\n", "")
