"""With ``exact=True``, loops compute bit for bit what they compute without a run; with the defaults they do not."""

import pytest
import torch
from distributed import small
from torch import nn
from torch.optim import Adagrad, RMSprop
from torch.utils.data import DataLoader, TensorDataset

from nano_loop import all_gather, nano
from nano_loop.config.declarations import EXACT as VALUES
from nano_loop.kernels import activations
from nano_loop.kernels.norm import norms

from .nested import differences
from .pairs import EXACT, FUSED, built, check, is_model, run_accelerated, run_plain
from .tasks import ADAMW, SGD, ConvNet, Net, fit, images, job, vectors

WORDS, WIDTH = 12, 8


class OfWords(nn.Module):
    """A classifier of sequences of words, by a layer over their embeddings."""

    def __init__(self, layer):
        super().__init__()
        self.table, self.layer = nn.Embedding(WORDS, WIDTH), layer
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, words):
        out = self.layer(self.table(words))
        return self.head(self.norm(out[0] if isinstance(out, tuple) else out).mean(1))


def sentences():
    words = torch.randint(WORDS, (20, 7))
    return DataLoader(TensorDataset(words, words[:, 0] % 3), 8, shuffle=True)


def of_words(layer):
    return lambda: OfWords(layer()), sentences


MODELS = {
    "MLP": (Net, vectors),
    "CNN": (ConvNet, images),
    "transformer": of_words(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, activation="gelu", batch_first=True)),
    "LSTM": of_words(lambda: nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)),
    "GRU": of_words(lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "RNN": of_words(lambda: nn.RNN(WIDTH, WIDTH, batch_first=True)),
    "embeddings": of_words(lambda: nn.Sequential(nn.GELU("tanh"), nn.Dropout(0.1), nn.Tanh())),
}


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch):
    for place in (activations, norms):
        monkeypatch.setattr(place, "MIN_ELEMENTS", 1)


@pytest.mark.parametrize("name", MODELS)
def test_exact_loops_compute_what_plain_ones_do(name):
    model, loader = MODELS[name]
    for optimizer in (SGD, ADAMW, Adagrad, RMSprop):
        check(job(model=model, optimizer=optimizer, loader=loader), fit, EXACT)


@pytest.mark.parametrize("name", MODELS)
def test_loops_with_the_defaults_round_otherwise(name):
    """Otherwise the test above would prove nothing."""
    model, loader = MODELS[name]
    builds = [job(model=model, optimizer=optimizer, loader=loader) for optimizer in (ADAMW, Adagrad)]
    # With few values, those of one optimizer may be equal by chance.
    seen = [(run_accelerated(build, fit, FUSED)[0]["seen"], run_plain(build, fit)["seen"]) for build in builds]
    assert any([*differences(*both)] for both in seen)


def test_report_of_an_exact_run_has_no_step_that_changes_bits():
    train = nano(exact=True, verbose=False)(fit)
    train(**built(job(model=ConvNet, loader=images)))
    named = {result.name for result in train.report.results}
    assert {"allocator", "fast_dropout", "fast_fetch"} <= named
    assert not named & VALUES.keys()


@pytest.mark.usefixtures("nothing_left")
def test_two_ranks_are_alike_to_the_bit():
    def train(**arguments):
        losses = fit(**arguments)
        (model,) = filter(is_model, arguments.values())
        return losses, all_gather(small.weights(model))

    model, loader = MODELS["transformer"]
    arguments = built(job(model=model, optimizer=ADAMW, loader=loader))
    losses, weights = nano(**small.OPTIONS, exact=True)(train)(**arguments)
    assert losses
    assert torch.equal(weights[0], weights[1])
