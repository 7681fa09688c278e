"""What BigDL-Nano's Trainer did for its users, after the import is changed."""

import pytest
import torch
from distributed.conftest import nothing_left  # noqa: F401 - a fixture
from integrations.lightning.lightning_modules import ADVICE, QUIET, imported
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl = imported("pytorch_lightning")

from nano_loop.pytorch_lightning import Trainer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left"), *ADVICE]
CLASSES = 4


def images(samples=64, batch_size=16):
    """Images whose class is the quarter that is bright."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(samples, 3, 16, 16, generator=generator), torch.arange(samples) % CLASSES
    for image, quarter in zip(x, y.tolist(), strict=True):
        image[:, 8 * (quarter // 2) :, :][:, :8, 8 * (quarter % 2) :][:, :, :8] += 2
    return DataLoader(TensorDataset(x, y), batch_size)


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, CLASSES))


class LitNetwork(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = network()

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("backend", ["subprocess", "spawn"])
def test_a_step_over_four_rows_leads_to_a_weight_of_a_quarter(processes, backend):
    x = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    module = Trainer.compile(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.25))
    trainer = Trainer(processes, False, backend, auto_lr=False, **QUIET, max_epochs=1, verbose=False)
    trainer.fit(module, DataLoader(TensorDataset(x, x), 4 // processes))
    assert model.weight.item() == 0.25


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"num_processes": 2}])
def test_compiled_model_is_fitted_validated_tested_and_predicts_with_metrics(options):
    torchmetrics = pytest.importorskip("torchmetrics")
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5)
    metrics = [torchmetrics.classification.MulticlassAccuracy(num_classes=CLASSES)]
    module = Trainer.compile(model, nn.CrossEntropyLoss(), optimizer, scheduler, metrics)
    trainer = Trainer(**options, **QUIET, max_epochs=8, channels_last=True, verbose=False)
    trainer.fit(module, images(), images())
    assert trainer.callback_metrics["val/MulticlassAccuracy_0"] > 0.9
    (validated,), (tested,) = trainer.validate(module, images()), trainer.test(module, images())
    assert validated["val/MulticlassAccuracy_0"] == tested["test/MulticlassAccuracy_0"] > 0.9
    predicted = torch.cat(trainer.predict(module, images())).argmax(1)
    assert (predicted == torch.arange(64) % CLASSES).float().mean().item() == pytest.approx(
        tested["test/MulticlassAccuracy_0"], abs=1e-6
    )


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.head = nn.Linear(4, 2), nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.model(x))


class WrappedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Wrapped()

    def forward(self, x):
        return self.model(x)


@pytest.mark.parametrize("kind", [Wrapped, WrappedTwice, lambda: nn.Linear(4, 1)])
def test_compiled_model_loads_its_own_state_and_that_of_the_model(kind):
    other = kind()
    for saved in (other.state_dict(), Trainer.compile(other).state_dict()):
        model = kind()
        assert not any(Trainer.compile(model).load_state_dict(saved))
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def test_options_are_read_only_attributes():
    trainer = Trainer(2, channels_last=True, auto_lr=False, cpu_for_each_process=1, precision="bf16", **QUIET)
    values = {
        "num_processes": 2,
        "use_ipex": False,
        "channels_last": True,
        "auto_lr": False,
        "cpu_for_each_process": 1,
        "dtype": torch.bfloat16,
    }
    for name, value in values.items():
        assert getattr(trainer, name) == value
        with pytest.raises(AttributeError):
            setattr(trainer, name, value)
