"""Sequences: BERT, GPT-2 and Qwen2 of transformers, with random weights, and a language model of torch's own LSTM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.workload import Workload


def bert(small: bool) -> Workload:
    """BERT-base with its dropout, 8 sequences of 128 tokens, AdamW; small, 4, 2 of its 12 layers and 8,000 words."""
    from transformers import BertConfig, BertForMaskedLM

    layers, words, batch = (2, 8000, 4) if small else (12, 30522, 8)
    model = BertForMaskedLM(BertConfig(vocab_size=words, num_hidden_layers=layers))
    return _language_model(model, torch.randint(words, (batch, 128)), steps=4 if small else 6)


def gpt2(small: bool) -> Workload:
    """GPT-2 with 6 layers and its dropout, 4 sequences of 256 tokens, AdamW; small, 2, 2 layers and 8,000 words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, words, batch = (2, 8000, 2) if small else (6, 50257, 4)
    config = GPT2Config(vocab_size=words, n_layer=layers, bos_token_id=0, eos_token_id=0)
    return _language_model(GPT2LMHeadModel(config), torch.randint(words, (batch, 256)), steps=4 if small else 6)


def gpt2_masked(small: bool) -> Workload:
    """A GPT-2 of 49M parameters, 4 sequences of 512 tokens, half of the labels ignored, AdamW; small, 1 of 128."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, words, shape = (2, 8000, (1, 128)) if small else (7, 50257, (4, 512))
    config = GPT2Config(vocab_size=words, n_embd=512, n_head=8, n_layer=layers, bos_token_id=0, eos_token_id=0)
    work = _language_model(GPT2LMHeadModel(config), torch.randint(words, shape), steps=4 if small else 6)
    tokens = work.batches[0]
    work.batches = [(tokens, tokens.masked_fill(torch.rand(shape) < 0.5, -100))]
    work.loss = lambda model, batch: model(input_ids=batch[0], labels=batch[1]).loss
    return work


def _language_model(model: nn.Module, tokens: Tensor, steps: int) -> Workload:
    return Workload(
        model,
        torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-4),
        [tokens],
        lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
        steps=steps,
    )


class LowRank(nn.Module):
    """A frozen linear layer and a low-rank adapter beside it, as PEFT's of rank 8, which no environment here needs."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 8, bias=False), nn.Linear(8, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x.to(self.down.weight.dtype)))


def qwen_lora(small: bool) -> Workload:
    """Qwen2-0.5B's shape, LoRA of q and v, 1 sequence of 256 tokens, AdamW; small, 2 of its 24 layers, 8,000 words."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    layers, words = (2, 8000) if small else (24, 151936)
    config = Qwen2Config(
        vocab_size=words,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).requires_grad_(False)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj, attention.v_proj = LowRank(attention.q_proj), LowRank(attention.v_proj)
    return _language_model(model, torch.randint(words, (1, 256)), steps=4 if small else 6)


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
    tokens = torch.randint(words, (batch, length + 1))
    # torch's counter does not know oneDNN's LSTM. In each of the two layers four gates of a product with the input
    # and one with the state; in the backward twice that again.
    gates = 3 * 2 * batch * length * 2 * (4 * width) * (2 * width)
    return Workload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        [tokens],
        lambda model, tokens: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()),
        steps=6 if small else 20,
        uncounted_flops=gates,
    )
