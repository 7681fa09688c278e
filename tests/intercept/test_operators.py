"""A kernel of torch's is replaced for a time."""

import subprocess
import sys
import textwrap

import pytest
import torch

from nano_loop.intercept.operators import gives_kernels, overridden, plainly

gets_kernels = pytest.mark.skipif(not gives_kernels(), reason="torch does not hand out its kernels")


def sevens(tensor, p=0.5, *, generator=None):
    return tensor.fill_(7)


def plus_ten(original):
    return lambda keys, tensor, *args, **kwargs: original(keys, tensor, *args, **kwargs).add_(10)


def drawn():
    return torch.empty(3).bernoulli_(0.5)


def is_plain():
    return drawn().max() <= 1


def test_function_stands_in_until_the_context_is_left():
    with overridden("bernoulli_.float", plainly(sevens), "CPU"):
        assert drawn().tolist() == [7, 7, 7]
    assert is_plain()


def test_kernel_is_back_after_an_exception():
    with pytest.raises(ZeroDivisionError), overridden("bernoulli_.float", plainly(sevens), "CPU"):
        raise ZeroDivisionError
    assert is_plain()


@gets_kernels
def test_it_stays_until_the_last_user_has_left_and_torchs_kernel_is_taken_once():
    """Of two runs in two threads the first may end first."""
    first = overridden("bernoulli_.float", plus_ten, "CPU")
    second = overridden("bernoulli_.float", plus_ten, "CPU")
    first.__enter__()
    second.__enter__()
    assert drawn().min() >= 10
    assert drawn().max() <= 11
    first.__exit__(None, None, None)
    assert drawn().min() >= 10
    second.__exit__(None, None, None)
    assert is_plain()


def test_first_override_of_a_process_warns_of_nothing():
    script = """
        import torch
        from nano_loop.intercept.operators import overridden, plainly
        with overridden("bernoulli_.float", plainly(lambda tensor, *args, **kwargs: tensor.fill_(7)), "CPU"):
            print(torch.empty(1).bernoulli_(0.5).item())
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert (run.stdout, run.stderr) == ("7.0\n", "")
