from pathlib import Path

import pytest
import torch

from benchmarks.libraries import PROGRAMS
from benchmarks.libraries.programs import seed

#: The programs that this environment supports.
HERE = [name for name, program in PROGRAMS.items() if torch.__version__.startswith(program.torch)]
# The requirements of these are in the other environment.
OF_2_13 = ["test_keras.py", "test_peft.py", "test_scripts.py", "test_strategy.py", "test_tutorial.py"]
collect_ignore = [] if "skorch" in HERE else OF_2_13


def pytest_collection_modifyitems(items):
    """Allow warnings of libraries, but not of nano_loop."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for rule in ("ignore", "error::nano_loop.NanoWarning", "ignore:.*this CPU has no bf16 instructions"):
                item.add_marker(pytest.mark.filterwarnings(rule))


@pytest.fixture(scope="session", autouse=True)
def settings_of_libraries():
    """Disable network access of libraries, and make Keras use torch."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("KERAS_BACKEND", "torch")
    yield
    patch.undo()


def train(name):
    """Return the weights and the loss of a program."""
    seed()
    trained = PROGRAMS[name].prepare(True)()
    states = (value for model in trained.models for value in model.state_dict().values())
    return [value.clone() for value in states if isinstance(value, torch.Tensor)], trained.loss


def are_equal(weights, others):
    return len(weights) == len(others) and all(map(torch.equal, weights, others))


@pytest.fixture(scope="module", params=HERE)
def plain(request):
    """A program and its results without nano_loop. The library has then made its lasting changes to the process."""
    train(request.param)  # a library's first fit may draw random numbers that later ones do not
    return request.param, *train(request.param)
