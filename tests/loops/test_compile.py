"""Models that were compiled before the loop, and models that nano_loop compiles."""

import os
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from .nested import differences
from .pairs import BF16, EXACT, FUSED, WITH_IPEX, Config, pair, run_accelerated, run_plain, untouched
from .tasks import ADAMW, Net, Normed, job, vectors


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


@pytest.fixture(scope="module")
def inductor(dynamo):
    """Inductor loads too, starts threads, and sets an environment variable when it builds its first kernel."""
    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its own use of torch.jit
        torch.compile(torch.nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


def inductors(test):
    """Mark a test that has inductor compile, which takes a C++ compiler and half a minute."""
    needed = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
    return pytest.mark.slow(needed(pytest.mark.usefixtures("inductor")(test)))


def full_batches():
    return vectors(size=24, shuffle=False)


def compiled(backend, model=Net):
    def build():
        return torch.compile(model(), backend=backend)

    return job(f"{backend}-{model.__name__}", model=build, optimizer=ADAMW, loader=full_batches)


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


@pair(compiled("eager"), compiled("aot_eager"), compiled("aot_eager", Normed), configs=[EXACT, FUSED, BF16, *WITH_IPEX])
def test_a_model_compiled_before(model, optimizer, loader, by_hand=untouched):
    return train(model, optimizer, loader, by_hand)


def compiled_in_place():
    arguments = job(optimizer=ADAMW, loader=full_batches)()
    arguments["model"].compile(backend="eager")
    return arguments


@pair(compiled_in_place, configs=[EXACT, BF16, *WITH_IPEX])
def test_a_model_compiled_in_place(model, optimizer, loader, by_hand=untouched):
    return train(model, optimizer, loader, by_hand)


@pair(job(optimizer=ADAMW, loader=full_batches), configs=[EXACT, BF16, *WITH_IPEX])
def test_a_model_compiled_inside_the_loop(model, optimizer, loader, by_hand=untouched):
    return train(torch.compile(model, backend="eager"), optimizer, loader, by_hand)


EAGER = {"compile": {"backend": "eager"}}
COMPILED = [
    Config("exact", {**EXACT.options, **EAGER}),
    Config("bf16", {**BF16.options, **EAGER}, subclass=True, raises=True),
    *(replace(each, options={**each.options, **EAGER}) for each in WITH_IPEX),
]


@pair(job(optimizer=ADAMW, loader=full_batches), configs=COMPILED)
def test_a_model_that_nano_loop_compiles(model, optimizer, loader, by_hand=untouched):
    """The backend that only traces changes no number."""
    return train(model, optimizer, loader, by_hand)


@inductors
@pair(compiled("inductor"), configs=[FUSED])
def test_a_model_compiled_by_inductor_before(model, optimizer, loader, by_hand=untouched):
    return train(model, optimizer, loader, by_hand)


def tanh_net():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


@inductors
def test_a_model_that_nano_loop_compiles_by_inductor():
    """Against the plain loop: inductor fuses, so it rounds otherwise, and it draws dropout's masks its own way."""
    build = job(model=tanh_net, loader=full_batches)
    config = Config("compile", {"compile": True}, tolerance=1e-4, raises=True)
    actual, _ = run_accelerated(build, train, config)
    expected = run_plain(build, train)
    found = [*differences(actual["seen"], expected["seen"], config.tolerance)]
    assert not found, "\n".join(found)
