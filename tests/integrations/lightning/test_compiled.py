"""`Trainer.compile`: a model, a loss and an optimizer train, as with BigDL-Nano's."""

import pytest
import torch
from integrations.lightning.lightning_modules import (
    ADVICE,
    NANO,
    QUIET,
    fitted,
    imported,
    loader,
    module_class,
    numbers,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl = imported("lightning.pytorch")

from nano_loop import NanoConfigError, NanoError  # noqa: E402
from nano_loop.lightning import Trainer  # noqa: E402

pytestmark = [pytest.mark.usefixtures("nothing_left"), *ADVICE]
CLASSES = 4


def images(samples=64, batch_size=16):
    """Return images whose class is the bright quarter."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(samples, 3, 16, 16, generator=generator), torch.arange(samples) % CLASSES
    for image, quarter in zip(x, y.tolist(), strict=True):
        image[:, 8 * (quarter // 2) :, :][:, :8, 8 * (quarter % 2) :][:, :, :8] += 2
    return DataLoader(TensorDataset(x, y), batch_size)


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, CLASSES))


def test_compiled_model_is_trained_validated_tested_and_predicts():
    torchmetrics = pytest.importorskip("torchmetrics")

    def distance(output, target):
        return (output - target).abs().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    metrics = [torchmetrics.MeanSquaredError(), distance]
    module = Trainer.compile(model, nn.functional.mse_loss, optimizer, metrics=metrics)
    trainer = Trainer(**QUIET, max_epochs=3, **NANO)
    trainer.fit(module, loader(), loader(12))
    assert {"train/loss", "val/loss", "val/distance_1"} <= trainer.callback_metrics.keys()
    (found,) = trainer.validate(module, loader(12), verbose=False)  # the last batch is smaller
    (of_test,) = trainer.test(module, loader(12, samples=16), verbose=False)
    for values, stage, samples in ((found, "val", 32), (of_test, "test", 16)):
        x, y = numbers(samples)
        loss = pytest.approx(nn.functional.mse_loss(model(x), y).item(), rel=1e-4)
        assert values[f"{stage}/loss"] == loss == values[f"{stage}/MeanSquaredError_0"]  # both over the epoch
        assert values[f"{stage}/distance_1"] == pytest.approx(distance(model(x), y).item(), rel=1e-4)
    x, _ = numbers()
    for data in (loader(), DataLoader(TensorDataset(x), 8)):  # with a target, which is ignored, and without
        torch.testing.assert_close(torch.cat(trainer.predict(module, data)), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"num_processes": 2}])
def test_compiled_model_learns_classes_in_bf16_and_in_two_processes(options):
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


def test_target_is_never_an_argument_of_a_compiled_model():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x, mask=None):
            assert mask is None
            return self.layer(x)

    model = Masked()
    fitted(Trainer, Trainer.compile(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.01)), **NANO)


@pytest.mark.parametrize(
    ("setting", "steps"),
    [
        (None, 3),  # the scheduler itself, once per epoch
        ({}, 3),
        ({"interval": "epoch"}, 3),
        ({"interval": "step"}, 6),
        ({"frequency": 3}, 1),
        ("plateau", 2),
    ],
)
def test_scheduler_of_a_compiled_model_steps_once_an_epoch_or_as_its_dict_says(setting, steps):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    if setting == "plateau":
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    else:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    given = {"scheduler": scheduler, **setting} if isinstance(setting, dict) else scheduler
    module = Trainer.compile(model, lambda out, y: 0 * out.sum() + 1, optimizer, given)
    fitted(Trainer, module, epochs=3, limit_train_batches=2, **NANO)
    assert optimizer.param_groups[0]["lr"] == 0.5**steps


def test_lightning_module_compiles_to_itself_and_wrong_arguments_are_named():
    module, model = module_class(pl)(), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert Trainer.compile(module) is module
    with pytest.raises(NanoConfigError, match="has its own loss"):
        Trainer.compile(module, nn.MSELoss())
    with pytest.raises(NanoConfigError, match=r"(?s)loss=1.*optimizer='Adam'.*metrics"):
        Trainer.compile(nn.Linear(1, 1), 1, "Adam", metrics=[3])
    with pytest.raises(NanoConfigError, match="LRScheduler"):
        Trainer.compile(model, nn.MSELoss(), optimizer, {"scheduler": "StepLR", "interval": "step"})
    with pytest.raises(NanoError, match="without an optimizer"):
        fitted(Trainer, Trainer.compile(nn.Linear(8, 1)), **NANO)
    with pytest.raises(NanoError, match="without a loss"):
        fitted(Trainer, Trainer.compile(model, optimizer=optimizer), **NANO)
