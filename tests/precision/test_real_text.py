"""The losses of a small language model on Python's documentation are those of plain torch, in each precision."""

import functools
import pydoc_data.topics
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from kernels import heads
from torch import nn

from nano_loop import nano
from nano_loop.policy import product_precision

STEPS, WORDS, LENGTH = 200, heads.WORDS, 64


@functools.cache
def windows():
    words = re.findall(r"\w+|\s+|[^\w\s]", "\n".join(pydoc_data.topics.topics.values()))
    numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common(WORDS - 1), start=1)}
    return torch.tensor([numbers.get(word, 0) for word in words]).unfold(0, LENGTH + 1, LENGTH)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, WORDS, bias=False)

    def forward(self, words):
        mask = nn.Transformer.generate_square_subsequent_mask(words.size(1), dtype=self.head.weight.dtype)
        return self.head(self.norm(self.layers(self.embedding(words), mask=mask, is_causal=True)))


def train(model, optimizer, schedule, seed):
    losses, generator = [], torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        batch = windows()[torch.randint(len(windows()), (8,), generator=generator)]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def mean_loss(seed, around=lambda function: function):
    torch.manual_seed(seed)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    losses = around(train)(model, optimizer, schedule, seed)
    assert losses[-1] < losses[0] * 2 / 3
    return sum(losses) / STEPS


plain = functools.cache(mean_loss)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, 1e-5),
        ({"precision": "auto"}, 1e-3),
        ({"precision": "bf16"}, 1e-3),
        ({"precision": "bf16-true"}, 1e-3),
        ({"precision": "bf16-true", "optimizer_state": "bf16"}, 1e-3),
    ],
    ids=str,
)
def test_mean_loss_is_plain_torchs(options, bound, seed, monkeypatch):
    monkeypatch.setitem(product_precision.MIN_MULTIPLICATIONS, product_precision.PRODUCT, 1 << 16)
    with heads.small_heads(chunk=100):
        found = mean_loss(seed, nano(verbose=False, tune_operators=False, **options))
    print(f"{options}: {found / plain(seed) - 1:+.4%}")
    assert found == pytest.approx(plain(seed), rel=bound)
