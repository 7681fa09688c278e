"""Text by Hugging Face's libraries, from configurations: nothing is downloaded."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.libraries.programs import Fit, Trained, program

QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "num_train_epochs": 1,
}


@program("transformers", "BertForSequenceClassification, trained by AdamW")
def bert(small: bool) -> Fit:
    """BERT."""
    from transformers import BertConfig, BertForSequenceClassification

    width, layers = (64, 2) if small else (256, 4)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=8000,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * width,
        )
    )
    tokens = _tokens(*((64, 32) if small else (160, 128)))
    return _trainer(model, [{"input_ids": row, "labels": (row[0] > 4000).long()} for row in tokens], 16)


@program("transformers", "GPT2LMHeadModel, trained by AdamW")
def gpt2(small: bool) -> Fit:
    """GPT-2."""
    return _trainer(*_gpt2(small), 8)


@program("peft", "PeftModelForCausalLM, trained by AdamW")
def lora(small: bool) -> Fit:
    """LoRA on GPT-2."""
    from peft import LoraConfig, get_peft_model

    model, rows = _gpt2(small)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["c_attn"], fan_in_fan_out=True)
    return _trainer(get_peft_model(model, adapters), rows, 8)


def _gpt2(small: bool) -> tuple[nn.Module, list[dict[str, Any]]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    width, layers = (64, 2) if small else (256, 4)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=8000, n_embd=width, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    return model, [{"input_ids": row, "labels": row} for row in _tokens(*((32, 32) if small else (96, 128)))]


def _tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(8000, (rows, length), generator=torch.Generator().manual_seed(0))


def _trainer(model: nn.Module, rows: list[dict[str, Any]], batch: int) -> Fit:
    from transformers import Trainer, TrainingArguments

    def fit() -> Trained:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(folder, per_device_train_batch_size=batch, **QUIET)
            return Trained([model], Trainer(model, arguments, train_dataset=rows).train().training_loss)

    return fit


@program("sentence-transformers", "MultipleNegativesRankingLoss, trained by AdamW")
def sentences(small: bool) -> Fit:
    """A sentence encoder."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = [f"w{number}" for number in range(1000)]
    width, layers = (32, 2) if small else (384, 6)
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder, "vocab.txt")
        vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
        BertTokenizerFast(vocab=str(vocabulary)).save_pretrained(folder)
        config = BertConfig(
            vocab_size=len(words) + 5,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * width,
        )
        BertModel(config).save_pretrained(folder)
        model = SentenceTransformer(folder, device="cpu")
    random = np.random.default_rng(0)
    rows = [random.choice(words, 24) for _ in range(64 if small else 160)]
    data = Dataset.from_dict(
        {"anchor": [" ".join(row) for row in rows], "positive": [" ".join(row[4:]) for row in rows]}
    )

    def fit() -> Trained:
        with tempfile.TemporaryDirectory() as place:
            arguments = SentenceTransformerTrainingArguments(place, per_device_train_batch_size=16, **QUIET)
            loss = MultipleNegativesRankingLoss(model)
            trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss)
            return Trained([model], trainer.train().training_loss)

    return fit


class Encoder(nn.Module):
    """A classifier of tokens' sequences."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.layers(self.embedding(tokens)).mean(1))
        return outputs


@program("accelerate", "Encoder, trained by AdamW")
def accelerate(small: bool) -> Fit:
    """A loop over a transformer."""
    from accelerate import Accelerator

    tokens = _tokens(*((64, 32) if small else (256, 64)))
    model = Encoder(*((64, 2) if small else (256, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    loader = DataLoader(TensorDataset(tokens, (tokens[:, 0] > 4000).long()), 16, shuffle=True)

    def fit() -> Trained:
        accelerator = Accelerator(cpu=True)
        prepared, stepper, batches = accelerator.prepare(model, optimizer, loader)
        for inputs, labels in batches:
            loss = nn.functional.cross_entropy(prepared(inputs), labels)
            stepper.zero_grad()
            accelerator.backward(loss)
            stepper.step()
        return Trained([model], loss.item())

    return fit
