"""A LightningModule trains as under plain Lightning, in one process and in two, whatever the module does."""

import csv
import importlib
from pathlib import Path

import pytest
import torch
from integrations.lightning.lightning_modules import (
    ADVICE,
    NANO,
    PACKAGES,
    PLAIN,
    Stream,
    data_class,
    fitted,
    gan_class,
    imported,
    loader,
    module_class,
    ours,
    weights,
)
from loops.pairs import rounding_every_product
from torch import nn
from torch.utils.data import DataLoader

pl = imported("lightning.pytorch")

from nano_loop.kernels.linear import product  # noqa: E402
from nano_loop.lightning import Trainer  # noqa: E402
from nano_loop.patching.operators import gives_kernels  # noqa: E402
from nano_loop.policy.product_precision import Policy  # noqa: E402

pytestmark = [pytest.mark.usefixtures("nothing_left"), *ADVICE]
Regression, Dealing = module_class(pl), data_class(pl)
Streaming = data_class(pl, lambda size: DataLoader(Stream(), size))
OTHER_PACKAGE = pytest.param(PACKAGES[1], marks=pytest.mark.slow)
#: The modules by name: a class and its arguments. Ranks get the rows that `Dealing` assigns them.
TRAINERS = {
    "plain": (pl.Trainer, PLAIN),
    "one": (Trainer, NANO),
    "two": (Trainer, {**NANO, "num_processes": 2}),
}
DEALT = {"use_distributed_sampler": False, "epochs": 3}


def trained(name, module, data=Dealing, **settings):
    kind, more = TRAINERS[name]
    return fitted(kind, module, data(), **{**DEALT, **more, **settings})


@pytest.mark.parametrize("package", [PACKAGES[0], OTHER_PACKAGE])
@pytest.mark.parametrize("precision", [32, "bf16"])
def test_it_trains_as_plain_lightning_by_each_way_in(package, precision):
    lightning, own = importlib.import_module(package), ours(package)
    kind = module_class(lightning)
    plain = {**PLAIN, "devices": 1, "precision": {32: "32-true", "bf16": "bf16-mixed"}[precision]}
    expected, trainer = fitted(lightning.Trainer, kind(), **plain)
    found, accelerated = fitted(own.Trainer, kind(), **NANO, precision=precision)
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-6)
    assert "fused_optimizer" in accelerated.report.applied
    assert accelerated.callback_metrics["val"].item() == pytest.approx(trainer.callback_metrics["val"].item(), abs=1e-5)
    assert found.steps == expected.steps == 8
    for strategy in (own.NanoStrategy(**NANO), own.strategy(**NANO), "nano"):
        module, trainer = fitted(lightning.Trainer, kind(), **plain, strategy=strategy)
        assert torch.equal(weights(module), weights(found))
        assert trainer.strategy.report.applied == accelerated.report.applied
    accelerated.validate(found, loader(), verbose=False)  # optimizers are set up by fit only
    assert "fused_optimizer" not in {*accelerated.report.applied, *accelerated.report.skipped}


@pytest.mark.slow
def test_validate_test_and_predict_are_exact_and_fit_again_goes_on():
    expected, plain = fitted(pl.Trainer, Regression(), **PLAIN)
    found, trainer = fitted(Trainer, Regression(), **NANO)
    both = ((plain, expected), (trainer, found))
    for way in ("validate", "test"):
        results = [getattr(each, way)(module, loader(), verbose=False) for each, module in both]
        assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    outputs = [torch.cat(each.predict(module, loader())) for each, module in both]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    for each, module in both:
        each.fit_loop.max_epochs = 4
        each.fit(module, loader(shuffle=True), loader())
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-6)


def thawing():
    return Regression(32, 0.001, "Momentum"), [pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)]


def averaging():
    return Regression(), [pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)]


#: Loops: a function that makes a module and callbacks, Trainer settings, and the numbers of processes to test.
LOOPS = {
    "accumulation and clipping": (
        lambda: (Regression(), []),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        ("one", "two"),
    ),
    "manual optimization": (lambda: (gan_class(pl)(), []), {}, ("one", "two")),
    "weight averaging": (averaging, {}, ("one", "two")),
    "thawing": (thawing, {}, ("one", "two")),
    "LBFGS": (lambda: (Regression(optimizer="LBFGS", rate=0.1), []), {"epochs": 2}, ("one",)),
    "LBFGS in fp64": (lambda: (Regression(optimizer="LBFGS"), []), {"precision": "64-true"}, ("two",)),
    "a limit of batches": (
        lambda: (Regression(), []),
        {"limit_train_batches": 2, "val_check_interval": 1},
        ("one",),
    ),
    "an iterable dataset": (lambda: (Regression(), []), {"data": Streaming}, ("one", "two")),
}


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        pytest.param(loop, name, marks=[] if (loop, name) == ("manual optimization", "one") else pytest.mark.slow)
        for loop, (_, _, names) in LOOPS.items()
        for name in names
    ],
)
def test_loop_is_that_of_plain_lightning_with_the_batches_of_all_ranks(loop, name):
    make, settings, _ = LOOPS[loop]
    results = []
    for each in ("plain", name):
        module, callbacks = make()
        results.append(trained(each, module, callbacks=callbacks, **settings))
    (expected, _), (found, trainer) = results
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol={"one": 2e-6, "two": 5e-6}[name])
    assert not torch.equal(weights(found), weights(make()[0]))
    assert ("gradient_averaging" in trainer.report.applied) is (name == "two")


@pytest.mark.slow
def test_two_ranks_in_bf16_train_as_lightnings_bf16_with_the_double_batch():
    def with_momentum(name, precision="bf16-mixed"):
        return trained(name, Regression(32, 0.001, "Momentum"), precision=precision)

    (expected, _), (found, trainer) = with_momentum("plain"), with_momentum("two")
    exact, _ = with_momentum("plain", "32-true")
    distance = (weights(found) - weights(expected)).abs().max()
    assert 0 < distance < 2e-3
    assert (weights(exact) - weights(expected)).abs().max() > distance / 20  # bf16 and fp32 must differ
    assert trainer.precision == "bf16-mixed"


class Saving(pl.Callback):
    """Saves a checkpoint in the middle of an epoch."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step == 6:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("plain", "one"),
        *(
            pytest.param(*ways, marks=pytest.mark.slow)
            for ways in (("one", "plain"), ("plain", "two"), ("two", "plain"), ("two", "two"))
        ),
    ],
)
def test_checkpoints_resume_in_the_other_one_in_mid_epoch(tmp_path, first, second):
    for name in ("plain", first):
        trained(name, Regression(), epochs=2, callbacks=[Saving(tmp_path / name)])
    expected, plain = trained("plain", Regression(), ckpt_path=tmp_path / "plain")
    found, trainer = trained(second, Regression(), ckpt_path=tmp_path / first)
    assert trainer.global_step == plain.global_step == 12  # the checkpoint's epoch is completed
    atol = 5e-6 if "two" in (first, second) else 1e-6
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=atol)
    loaded = Regression.load_from_checkpoint(tmp_path / first, weights_only=False)
    assert loaded.hparams == {"width": 32, "rate": 0.01, "optimizer": "Adam"}


@pytest.mark.slow
def test_rates_and_metrics_are_logged_once_and_as_by_plain_lightning(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measured(Regression):
        def __init__(self):
            super().__init__()
            self.metric = torchmetrics.MeanSquaredError()

        def training_step(self, batch, index):
            x, y = batch
            output = self(x)
            self.metric(output, y)
            self.log("squares", self.metric, on_step=False, on_epoch=True)
            return nn.functional.mse_loss(output, y)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    logged = []
    for name in ("plain", "two"):
        logger = pl.loggers.CSVLogger(tmp_path / name, name="", version="")
        trained(name, Measured(), logger=logger, log_every_n_steps=1, callbacks=[pl.callbacks.LearningRateMonitor()])
        logged.append(list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())))
    expected, found = logged
    assert len(found) == len(expected) > 6
    assert found[0].keys() == expected[0].keys() >= {"lr-Adam", "squares", "val"}
    for mine, other in zip(found, expected, strict=True):
        for name in mine:
            assert (mine[name] == "") == (other[name] == "")
            assert float(mine[name] or 0) == pytest.approx(float(other[name] or 0), abs=1e-4)


@pytest.mark.parametrize("package", [PACKAGES[0], OTHER_PACKAGE])
def test_products_round_by_our_trainer_and_by_the_option_of_the_strategy(package, monkeypatch):
    """Both round equally often, see only fp32, and leave nothing behind."""
    if not gives_kernels():
        pytest.skip("it needs torch 2.9")
    if product.KERNEL.unavailable:
        pytest.skip(product.KERNEL.unavailable)
    rounding_every_product(monkeypatch)
    calls, note = [], Policy.note
    monkeypatch.setattr(Policy, "note", lambda self, *args: calls.append(args) or note(self, *args))
    lightning, own = importlib.import_module(package), ours(package)
    kind = module_class(lightning)

    class Seen(kind):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.seen = {loss.dtype, *(each.dtype for each in self.parameters())}
            return loss

    counts = []
    for trainer, settings in (
        (own.Trainer, {**NANO, "precision": "bf16-products"}),
        (lightning.Trainer, {**PLAIN, "strategy": own.NanoStrategy(precision="bf16-products")}),
        (lightning.Trainer, {**PLAIN, "strategy": own.strategy(precision="auto")}),
    ):
        module, _ = fitted(trainer, Seen(), **settings, devices=1)
        assert module.seen == {torch.float32}
        counts.append(len(calls) - sum(counts))
    assert counts[0]
    assert counts == counts[:1] * 3
    module(torch.ones(32, 8))  # after the run
    assert len(calls) == sum(counts)
