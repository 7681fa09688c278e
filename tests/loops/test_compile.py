"""Models that were compiled before the loop, and models that nano_loop compiles."""

import functools
import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy

from .nested import differences
from .pairs import BF16, EXACT, FUSED, Config, pair, run_accelerated, run_plain, untouched
from .tasks import ADAMW, Net, job, vectors

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="inductor needs a C++ compiler")


@pytest.fixture(scope="module")
def dynamo():
    """Dynamo loads at its first use, and starts a thread: before the loops, so that it is none of their traces."""
    torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1)).sum().backward()
    return torch._dynamo


@pytest.fixture(autouse=True)
def nothing_compiled_yet(dynamo):
    dynamo.reset()
    yield
    dynamo.reset()


def full_batches():
    return vectors(size=24, shuffle=False)


def compiled(backend):
    def build():
        return torch.compile(Net(), backend=backend)

    return job(backend, model=build, optimizer=ADAMW, loader=full_batches)


def train(model, optimizer, loader, by_hand=untouched):
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(by_hand(model)(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return losses, by_hand(model)(torch.ones(8, 6))


@pair(compiled("eager"), compiled("aot_eager"), configs=[EXACT, FUSED, BF16])
def test_a_model_compiled_before(model, optimizer, loader, by_hand=untouched):
    return train(model, optimizer, loader, by_hand)


def compiled_in_place():
    arguments = job(optimizer=ADAMW, loader=full_batches)()
    arguments["model"].compile(backend="eager")
    return arguments


@pair(compiled_in_place, configs=[EXACT, BF16])
def test_a_model_compiled_in_place(model, optimizer, loader, by_hand=untouched):
    return train(model, optimizer, loader, by_hand)


@pair(job(optimizer=ADAMW, loader=full_batches), configs=[EXACT, BF16])
def test_a_model_compiled_inside_the_loop(model, optimizer, loader, by_hand=untouched):
    return train(torch.compile(model, backend="eager"), optimizer, loader, by_hand)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # inductor's own
@needs_gcc
@pair(compiled("inductor"), configs=[FUSED])
def test_a_model_compiled_by_inductor_before(model, optimizer, loader, by_hand=untouched):
    return train(model, optimizer, loader, by_hand)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # inductor's own
@needs_gcc
def test_a_model_that_nano_loop_compiles():
    """Inductor fuses, so it rounds otherwise; a model without dropout, for which it has its own generator."""
    build = job(model=functools.partial(torch.nn.Sequential, torch.nn.Linear(6, 3)), loader=full_batches)
    config = Config("compile", {"compile": True}, tolerance=1e-4, raises=True)
    actual, _ = run_accelerated(build, train, config)
    expected = run_plain(build, train)
    found = [*differences(actual["seen"], expected["seen"], config.tolerance)]
    assert not found, "\n".join(found)
