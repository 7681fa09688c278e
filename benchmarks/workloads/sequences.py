"""Sequences: BERT and GPT-2 of transformers, with random weights, and a language model of torch's own LSTM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.workload import Workload


def bert(small: bool) -> Workload:
    """BERT-base with its dropout, 8 sequences of 128 tokens, AdamW."""
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(num_hidden_layers=2 if small else 12))
    return _language_model(model, batch=8, length=128, words=30522)


def gpt2(small: bool) -> Workload:
    """GPT-2 with 6 layers and its dropout, 4 sequences of 256 tokens, AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1 if small else 6))
    return _language_model(model, batch=4, length=128 if small else 256, words=50257)


class LstmModel(nn.Module):
    """An embedding, two LSTM layers and a linear head over the words."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def lstm(small: bool) -> Workload:
    """A language model of two LSTM layers 512 wide over 10,000 words, 16 sequences of 64 tokens, AdamW."""
    words, width, batch, length = 10_000, 512, 16, 64
    model = LstmModel(words, width)
    tokens = torch.randint(words, (batch, length))
    # Four gates of a product with the input and one with the state; twice that again in the backward.
    gates = 3 * 2 * batch * length * 2 * (4 * width) * (2 * width)
    return Workload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        [tokens],
        lambda model, tokens: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()),
        steps=6 if small else 20,
        uncounted_flops=gates,
    )


def _language_model(model: nn.Module, batch: int, length: int, words: int) -> Workload:
    tokens = torch.randint(words, (batch, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Workload(model, optimizer, [tokens], lambda model, tokens: model(input_ids=tokens, labels=tokens).loss)
