from pathlib import Path

import pytest
import torch

from benchmarks.libraries import PROGRAMS
from benchmarks.libraries.programs import seed

#: The programs of this environment.
HERE = [name for name, program in PROGRAMS.items() if torch.__version__.startswith(program.torch)]
# What these need is in the other environment.
collect_ignore = (
    ["test_fastai_optimizers.py"]
    if "skorch" in HERE
    else ["test_keras.py", "test_peft.py", "test_scripts.py", "test_strategy.py", "test_tutorial.py"]
)


def pytest_collection_modifyitems(items):
    """Let libraries warn, but not nano_loop."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for rule in ("ignore", "error::nano_loop.NanoWarning", "ignore:.*this CPU has no bf16 instructions"):
                item.add_marker(pytest.mark.filterwarnings(rule))


@pytest.fixture(scope="session", autouse=True)
def settings_of_libraries():
    """Let libraries look for nothing on the network, and Keras compute by torch."""
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
    """A program, and what it trains without nano_loop. Its library has then left in the process what it leaves."""
    train(request.param)  # the first fit of a library may draw random numbers that later ones do not
    return request.param, *train(request.param)
