"""Hugging Face's Trainer inside `nano_loop.accelerated` has the same steps, losses and checkpoints as without."""

import copy
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

import nano_loop

transformers = pytest.importorskip("transformers", reason="it is in the environments of IPEX and of the benchmarks")

ROOT = Path(__file__).resolve().parents[3]
CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}


class Sentences(Dataset):
    """Sequences of 16 tokens, whose class is determined by the first token."""

    def __init__(self, seed):
        self.tokens = torch.randint(100, (48, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index, 0] % 2}


def trainer(folder, **arguments):
    """Return a Trainer of a small BERT with dropout, which logs its loss at each step."""
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**CONFIG))
    given = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "logging_steps": 1}
    settings = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 3}
    settings["eval_strategy"] = "epoch"  # in all cases, because an evaluation draws random numbers
    options = transformers.TrainingArguments(str(folder), **given | settings | arguments)
    return transformers.Trainer(model, options, train_dataset=Sentences(1), eval_dataset=Sentences(2))


def logged(trained, name="loss"):
    return [float(each[name]) for each in trained.state.log_history if name in each]


def weights(trained):
    return copy.deepcopy(trained.model.state_dict())


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Train without nano_loop; return the results, and a checkpoint after the first epoch."""
    trained = trainer(tmp_path_factory.mktemp("plain"), save_strategy="epoch")
    trained.train()
    return trained


def test_bf16_trains_as_the_trainers_own_bf16_does(plain, tmp_path):
    theirs = trainer(tmp_path / "theirs", bf16=True)
    theirs.train()
    ours = trainer(tmp_path / "ours")
    # With fused_optimizer, the norm of clipped gradients is computed in C, and may differ in the last bit.
    with nano_loop.accelerated(ours.model, precision="bf16", fused_optimizer=False, verbose=False) as run:
        ours.train()
    assert "precision" in run.report.applied
    assert logged(ours) != logged(plain)
    assert_equal(weights(ours), weights(theirs))
    assert all(each.dtype is torch.float32 for each in ours.model.parameters())


def test_checkpoints_are_exchanged_in_both_directions(plain, tmp_path):
    continued = trainer(tmp_path)
    with nano_loop.accelerated(continued.model, exact=True, verbose=False):
        continued.train(resume_from_checkpoint=plain.args.output_dir + "/checkpoint-6")
    assert_equal(weights(continued), weights(plain))
    ours = trainer(tmp_path / "ours", save_strategy="epoch")
    with nano_loop.accelerated(ours.model, exact=True, verbose=False):
        ours.train()
    back = trainer(tmp_path / "back")
    back.train(resume_from_checkpoint=f"{tmp_path}/ours/checkpoint-6")
    assert_equal(weights(back), weights(plain))
