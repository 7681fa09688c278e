"""A small language model, whose head is treated as a large one."""

import contextlib

import pytest
import torch
from torch import nn

from nano_loop import accelerated
from nano_loop.kernels.head import head, layers

WORDS, WIDTH = 1000, 16


@contextlib.contextmanager
def small_heads(chunk=5):
    """Treat each layer with this many outputs as a head, with logits computed in chunks of `chunk` rows."""
    with pytest.MonkeyPatch.context() as patch:
        for place, name, value in (
            (layers, "LEAST_LOGITS", 1),
            (layers, "LEAST_CLASSES", WORDS),
            (head, "CHUNK_BYTES", 1),
            (head, "FEWEST_ROWS", chunk),
        ):
            patch.setattr(place, name, value)
        yield


class Language(nn.Module):
    """Predicts words. `loss` computes the loss of its logits, or returns something else."""

    def __init__(self, loss=None, tied=False, bias=True, frozen=()):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, words, *targets):
        logits = self.head(torch.tanh(self.inner(self.embedding(words))))
        return logits if self.loss is None else self.loss(logits, *targets)


def model_of(*args, **settings):
    torch.manual_seed(0)
    return Language(*args, **settings)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    words, targets = torch.randint(WORDS, (2, 3, 7), generator=generator)
    targets[1, 2:5] = -100
    return words, targets


def inside_and_outside(function, **options):
    """Return what a function of a model returns in a run, and without one."""
    model = model_of()
    with accelerated(model, verbose=False, **options):
        found = function(model)
    return found, function(model_of())


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]
