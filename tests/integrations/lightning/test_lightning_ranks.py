"""Two ranks under Lightning's Trainer equal one process with the double batch, whatever the module does."""

import csv
from pathlib import Path

import pytest
import torch
from distributed.conftest import nothing_left  # noqa: F401 - a fixture
from distributed.launch.started import run_cells
from integrations.lightning.lightning_modules import (
    ADVICE,
    QUIET,
    Dealt,
    Stream,
    imported,
    loader,
    loops,
    module_class,
    saving_class,
    weights,
)
from torch import nn
from torch.utils.data import DataLoader

pl = imported("lightning.pytorch")

from nano_loop.lightning import Trainer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left"), *ADVICE]
Regression, Saving = module_class(pl), saving_class(pl)
NANO = {"num_processes": 2, "verbose": False, "auto_lr": False}


class Dealing(pl.LightningDataModule):
    """Deals rows in turn, so that the batches of two ranks are together those of one."""

    def train_dataloader(self):
        rank, count = self.trainer.global_rank, self.trainer.world_size
        return loader(8 // count, sampler=Dealt(32, rank, count))

    def val_dataloader(self):
        return loader()


class Streaming(Dealing):
    def train_dataloader(self):
        return DataLoader(Stream(), 8 // self.trainer.world_size)


def plain_and_two(make, data=Dealing, fit=None, **settings):
    """Train with plain Lightning and with two ranks; `make` returns a module and callbacks."""
    results = []
    for kind, more in ((pl.Trainer, {"accelerator": "cpu"}), (Trainer, NANO)):
        module, callbacks = make()
        trainer = kind(
            **{**QUIET, "max_epochs": 3, "use_distributed_sampler": False, **settings}, callbacks=callbacks, **more
        )
        trainer.fit(module, datamodule=data(), **(fit or {}))
        results.append((module, trainer))
    return results


def with_momentum():
    return Regression(32, 0.001, "Momentum"), []


class Scheduled(Regression):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


LOOPS = {
    **loops(pl, Regression),
    "LBFGS": (lambda: (Regression(optimizer="LBFGS", rate=0.01), []), {"precision": "64-true"}),
    "an iterable dataset": (lambda: (Regression(), []), {"data": Streaming}),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_two_ranks_equal_one_with_the_double_batch(loop):
    make, settings = LOOPS[loop]
    (expected, _), (found, trainer) = plain_and_two(make, **settings)
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=5e-6)
    assert not torch.equal(weights(found), weights(make()[0]))
    assert "gradient_averaging" in trainer.report.applied


def test_two_ranks_in_bf16_train_as_lightnings_bf16_with_the_double_batch():
    (expected, _), (found, trainer) = plain_and_two(with_momentum, precision="bf16-mixed")
    (exact, _), _ = plain_and_two(with_momentum)
    distance = (weights(found) - weights(expected)).abs().max()
    assert 0 < distance < 2e-3
    assert (weights(exact) - weights(expected)).abs().max() > distance / 20  # as bf16 and fp32 differ
    assert trainer.precision == "bf16-mixed"


def test_rates_and_metrics_are_logged_once_and_as_by_plain_lightning(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Scheduled):
        def __init__(self):
            super().__init__()
            self.metric = torchmetrics.MeanSquaredError()

        def training_step(self, batch, index):
            x, y = batch
            output = self(x)
            self.metric(output, y)
            self.log("squares", self.metric, on_step=False, on_epoch=True)
            return nn.functional.mse_loss(output, y)

    logged = []
    for place in ("plain", "two"):
        logger = pl.loggers.CSVLogger(tmp_path / place, name="", version="")
        monitor = pl.callbacks.LearningRateMonitor()
        more = {"accelerator": "cpu"} if place == "plain" else NANO
        settings = {**QUIET, "logger": logger, "log_every_n_steps": 1, "use_distributed_sampler": False}
        kind = pl.Trainer if place == "plain" else Trainer
        kind(max_epochs=3, callbacks=[monitor], **settings, **more).fit(Measured(), datamodule=Dealing())
        logged.append(list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())))
    expected, found = logged
    assert len(found) == len(expected) > 6
    assert found[0].keys() == expected[0].keys() >= {"lr-Adam", "squares", "val"}
    for mine, other in zip(found, expected, strict=True):
        for name in mine:
            assert (mine[name] == "") == (other[name] == "")
            assert float(mine[name] or 0) == pytest.approx(float(other[name] or 0), abs=1e-4)


def test_checkpoints_of_two_ranks_and_of_plain_lightning_resume_in_the_other(tmp_path):
    kinds = {"plain": (pl.Trainer, {"accelerator": "cpu"}), "two": (Trainer, NANO)}

    def fitted(place, callbacks, epochs, path=None):
        kind, more = kinds[place]
        module = Regression()
        trainer = kind(**QUIET, max_epochs=epochs, use_distributed_sampler=False, callbacks=callbacks, **more)
        trainer.fit(module, datamodule=Dealing(), ckpt_path=path)
        return weights(module), trainer.global_step

    for place in kinds:
        fitted(place, [Saving(tmp_path / place)], 2)
    expected, steps = fitted("plain", [], 3, tmp_path / "plain")
    assert steps == 12  # the epoch that the checkpoint was in goes on
    for first, second in (("plain", "two"), ("two", "plain"), ("two", "two")):
        found, resumed = fitted(second, [], 3, tmp_path / first)
        assert resumed == steps
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    loaded = Regression.load_from_checkpoint(tmp_path / "two", weights_only=False)
    assert loaded.hparams == {"width": 32, "rate": 0.01, "optimizer": "Adam"}


CELLS = [
    """
import warnings
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from nano_loop.lightning import Trainer
warnings.simplefilter("ignore")

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

module = Module()
loader = DataLoader(TensorDataset(torch.ones(32, 4), torch.ones(32, 1)), 4)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(2, max_epochs=3, verbose=False, **quiet)
""",
    "trainer.fit(module, loader)",
    "print('error', (module.layer(torch.ones(1, 4)) - 1).abs().item() < 1e-2, trainer.world_size)",
    "trainer.fit_loop.max_epochs = 4; trainer.fit(module, loader); print(trainer.current_epoch)",
]


def test_notebook_trains_the_module_of_a_cell_in_two_processes(tmp_path):
    shown = run_cells(CELLS, tmp_path)
    assert not [each["error"] for each in shown if "error" in each], shown
    assert shown[2]["stdout"] == "error True 2\n"
    assert shown[3]["stdout"].splitlines()[-1] == "4"
