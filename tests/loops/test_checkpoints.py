"""Training resumes from a checkpoint, whichever of the two runs was accelerated."""

import functools
import io

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from nano_loop import nano

from .nested import differences
from .pairs import IPEX, WITH_IPEX, seed_all, untouched
from .records import laid_otherwise, record, record_strides
from .tasks import ConvNet, Net, fit, images, vectors

# The layout of a convolution, like the precision, changes the order of summation, so results are not equal bit for bit,
# and Adam divides by the gradient's own size. A missing guard changes the weights by the order of the learning rate:
# 0.01.
TOLERANCES = {False: 1e-5, True: 1e-3}
OPTIMIZERS = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "adamw_amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.01),
}
WAYS = {
    "plain-accelerated": (None, {}),
    "accelerated-plain": ({}, None),
    "accelerated-accelerated": ({}, {}),
    "plain-channels_last": (None, {"channels_last": True}),
    "channels_last-plain": ({"channels_last": True}, None),
    "channels_last-channels_last": ({"channels_last": True}, {"channels_last": True}),
    "channels_last-accelerated": ({"channels_last": True}, {}),
    "plain-channels_last-unfused": (None, {"channels_last": True, "fused_optimizer": False}),
    "plain-fp64": (None, {"precision": 64}),
    "fp64-plain": ({"precision": 64}, None),
    "fp64-fp64": ({"precision": 64}, {"precision": 64}),
    **({"plain-ipex": (None, IPEX.options), "ipex-plain": (IPEX.options, None)} if WITH_IPEX else {}),
}


TURNS = ("plain-accelerated", "accelerated-plain", "plain-channels_last", "channels_last-plain")


def new_run(optimizer, seed, convolutional=True):
    seed_all(seed)
    model = ConvNet() if convolutional else Net()
    optimizer = optimizer(model.parameters())
    return {"model": model, "optimizer": optimizer, "scheduler": CosineAnnealingLR(optimizer, 4)}


def train(model, optimizer, scheduler, loader, checkpoint=None):
    if checkpoint is not None:
        load(checkpoint, model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in range(2):
        fit(model, optimizer, loader, untouched, epochs=1)
        scheduler.step()
    return saved(model=model, optimizer=optimizer, scheduler=scheduler)


def saved(**owners):
    buffer = io.BytesIO()
    torch.save({name: owner.state_dict() for name, owner in owners.items()}, buffer)
    return buffer.getvalue()


def load(checkpoint, **owners):
    states = torch.load(io.BytesIO(checkpoint))
    for name, owner in owners.items():
        owner.load_state_dict(states[name])


def launch(options, arguments, loader, checkpoint=None):
    run = train if options is None else nano(verbose=False, **options)(train)
    return run(**arguments, loader=loader, checkpoint=checkpoint)


def resumed(optimizer, ways, inside, convolutional=True):
    """Train two epochs one way, then two the other way with new objects that load the first ones' checkpoint."""
    seed_all(0)
    loader = images() if convolutional else vectors()
    checkpoint = launch(ways[0], new_run(optimizer, 1, convolutional), loader)
    arguments = new_run(optimizer, 2, convolutional)
    seed_all(3)
    if not inside:
        load(checkpoint, **arguments)
    last = launch(ways[1], arguments, loader, checkpoint if inside else None)
    return arguments, last


@functools.cache
def resumed_plainly(optimizer, inside):
    """Return the values to compare of two plain runs, which are the same for every way."""
    arguments, _ = resumed(OPTIMIZERS[optimizer], (None, None), inside)
    return record(arguments), record_strides(arguments)


#: Adam has states of both kinds, and the others change the layouts of theirs.
RESUMED = [
    *((ways, "adam", True) for ways in WAYS),
    *((ways, "adam", False) for ways in WAYS if ways in TURNS or "fp64" in ways),
    *((ways, name, True) for ways in TURNS if "channels_last" in ways for name in OPTIMIZERS if name != "adam"),
]


@pytest.mark.parametrize(("ways", "optimizer", "inside"), RESUMED)
def test_a_run_is_resumed(ways, optimizer, inside):
    expected, strides = resumed_plainly(optimizer, inside)
    actual, _ = resumed(OPTIMIZERS[optimizer], WAYS[ways], inside)
    tolerance = TOLERANCES["channels_last" in ways or "fp64" in ways]
    found = [*differences(record(actual), expected, tolerance)]
    found += differences(record_strides(actual), strides, path="strides")
    found += laid_otherwise(actual)
    assert not found, "\n".join(map(str, found))
