"""Small LightningModules for the tests, for either of Lightning's packages, and functions that train them."""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
PLAIN, NANO = {"accelerator": "cpu"}, {"verbose": False, "auto_lr": False}
ROOT = Path(__file__).parents[3]
#: Warnings: Lightning's advice, and a deprecated torch name that it still uses.
ADVICE = [
    pytest.mark.filterwarnings("ignore:.*(does not have many workers|log_every_n_steps|dataloader is not resumable)"),
    pytest.mark.filterwarnings("ignore:.*(LeafSpec|exists and is not empty|number of training batches)"),
    pytest.mark.filterwarnings("ignore:.*(tensorboard|by the model summary|no `(val_dataloader|validation_step)`)"),
]
MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)


def imported(package):
    """Return one of Lightning's packages, or skip the test module; `torch.compile` stays torch's.

    Lightning replaces it, which tests of compiled models would see in processes that have imported Lightning.
    """
    before = torch.compile
    try:
        return pytest.importorskip(package)
    finally:
        torch.compile = before


def ours(package):
    """Return nano_loop's module for one of Lightning's packages."""
    return importlib.import_module(f"nano_loop.{package.partition('.')[0]}")


def fitted(trainer, module, data=None, epochs=2, ckpt_path=None, **settings):
    """Fit a module with a Trainer of this class, and return both; `data` is a loader or a datamodule."""
    fitting = trainer(**{**QUIET, "max_epochs": epochs, **settings})
    data = loader(shuffle=True) if data is None else data
    fitting.fit(module, data, loader() if isinstance(data, DataLoader) else None, ckpt_path=ckpt_path)
    return module, fitting


def executed(program, folder, *before):
    """Run a script, optionally with a launcher such as torchrun given by `before`."""
    (folder / "script.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, *before, "script.py"]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=folder, env=environment)


def numbers(samples=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator)
    return x, x.sum(1, keepdim=True)


def loader(batch=8, samples=32, shuffle=False, **settings):
    generator = torch.Generator().manual_seed(3) if shuffle else None
    return DataLoader(TensorDataset(*numbers(samples)), batch, shuffle=shuffle, generator=generator, **settings)


class Dealt(torch.utils.data.Sampler):
    """Returns rows r, r+N, … in order, so that N ranks together see the batches of one process."""

    def __init__(self, samples, rank, count):
        self._rows = range(rank, samples, count)

    def __iter__(self):
        return iter(self._rows)

    def __len__(self):
        return len(self._rows)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(list(zip(*numbers(), strict=True)))


def module_class(pl):
    class Regression(pl.LightningModule):
        """A network with dropout-free layers, and every hook that a user is likely to define."""

        def __init__(self, width=32, rate=0.01, optimizer="Adam"):
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(0)
            self.backbone = nn.Sequential(nn.Linear(8, width), nn.ReLU())
            self.head = nn.Linear(width, 1)
            self.steps = 0

        def forward(self, x):
            return self.head(self.backbone(x))

        def loss(self, batch):
            x, y = batch
            return nn.functional.mse_loss(self(x), y)

        def training_step(self, batch, index):
            loss = self.loss(batch)
            self.log("train", loss, on_epoch=True, sync_dist=True)
            self.steps += 1
            return loss

        def validation_step(self, batch, index):
            self.log("val", self.loss(batch), sync_dist=True)

        def test_step(self, batch, index):
            self.log("test", self.loss(batch), sync_dist=True)

        def predict_step(self, batch, index):
            return self(batch[0])

        def configure_optimizers(self):
            trained = [each for each in self.parameters() if each.requires_grad]
            kind = MOMENTUM if self.hparams.optimizer == "Momentum" else getattr(torch.optim, self.hparams.optimizer)
            return kind(trained, self.hparams.rate)

        def on_train_batch_end(self, outputs, batch, index):
            self.last_index = index

    return Regression


def gan_class(pl):
    class Gan(pl.LightningModule):
        """Manual optimization with two optimizers."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(0)
            self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
            self.critic = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))

        def training_step(self, batch, index):
            x, y = batch
            of_generator, of_critic = self.optimizers()
            fake = self.generator(x)
            loss = -self.critic(fake).mean()
            of_generator.zero_grad()
            self.manual_backward(loss)
            of_generator.step()
            loss = self.critic(fake.detach()).mean() - self.critic(y).mean()
            of_critic.zero_grad()
            self.manual_backward(loss)
            of_critic.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(each.parameters(), 0.01) for each in (self.generator, self.critic)]

    return Gan


def data_class(pl, batches=None):
    class Dealing(pl.LightningDataModule):
        """Distributes rows in turn, or by `batches`, so that all ranks together have the batches of one process."""

        def train_dataloader(self):
            rank, count = self.trainer.global_rank, self.trainer.world_size
            return batches(8 // count) if batches else loader(8 // count, sampler=Dealt(32, rank, count))

        def val_dataloader(self):
            return loader()

    return Dealing


def weights(module):
    return torch.cat([each.detach().flatten() for each in module.parameters()])
