"""The arguments of nano_loop's Trainer: BigDL-Nano's, Lightning's, nano_loop's options and the environment."""

import re

import pytest
import torch
from integrations.lightning.lightning_modules import (
    ADVICE,
    NANO,
    PLAIN,
    QUIET,
    ROOT,
    executed,
    fitted,
    imported,
    module_class,
)
from integrations.lightning.test_compiled import images, network
from loops.pairs import has_ipex
from torch import nn

pl = imported("lightning.pytorch")

from nano_loop import NanoConfigError  # noqa: E402
from nano_loop.config.leftovers import REMOVED  # noqa: E402
from nano_loop.lightning import NanoStrategy, Trainer  # noqa: E402

pytestmark = [pytest.mark.usefixtures("nothing_left"), *ADVICE]
Regression = module_class(pl)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "ddp"}, "this Trainer has one"),
        ({"use_hpo": True}, "does not search hyperparameters"),
        ({"algorithms": [pl.Callback()]}, r"Pass callbacks=\[...\]"),
        ({"num_processes": 3, "cpu_for_each_process": [[0], [1]]}, "has 2 lists"),
        ({"accelerator": "gpu"}, "trains on CPUs"),
        ({"num_processes": 2, "devices": 3}, "both are the number of processes"),
        ({"num_processes": "auto", "split_batches": True}, "nano-loop tune does not vary"),
        ({"channels_last": 3}, "channels_last=3"),
        *(({name: True}, f"{name}=True: it was removed.*Omit it") for name in REMOVED),
        ({"num_processes": 0}, "num_processes=0"),
        ({"precision": "fp17"}, r"precision='fp17': it must be \"auto\", .*Lightning's names"),
        ({"verify": True}, r"verify=True.*Call nano_loop.verify"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises((NanoConfigError, ValueError), match=words):
        Trainer(**QUIET, **arguments)


def test_options_are_read_only_attributes():
    defaults = {"algorithms": None, "use_hpo": False, **QUIET}  # BigDL-Nano's
    trainer = Trainer(2, channels_last=True, auto_lr=False, cpu_for_each_process=1, precision="bf16", **defaults)
    assert trainer.num_devices == 2
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


def test_auto_precision_rounds_products_and_others_are_lightnings():
    _, trainer = fitted(Trainer, Regression(), precision="auto", **NANO)
    assert (trainer.precision, trainer.report.options["precision"]) == ("bf16-products", "bf16-products")
    assert Trainer(**QUIET, precision="64-true").precision == "64-true"


class DtypeNoting(Regression):
    def training_step(self, batch, index):
        self.seen = {each.dtype for each in self.parameters()}
        return super().training_step(batch, index)


def test_environment_overrides_our_trainer_and_must_not_contradict_lightning_s(monkeypatch):
    def of_lightning(devices=1, precision="32-true", strategy="nano"):
        return pl.Trainer(**QUIET, **PLAIN, strategy=strategy, devices=devices, precision=precision)

    monkeypatch.setenv("NANO_LOOP_PRECISION", "bf16")
    monkeypatch.setenv("NANO_LOOP_NUM_PROCESSES", "2")
    trainer = Trainer(1, precision=32, **QUIET)
    assert (trainer.precision, trainer.world_size) == ("bf16-mixed", 2)
    for devices, precision in ((2, "32-true"), (3, "bf16-mixed")):
        with pytest.raises(NanoConfigError, match=r"NANO_LOOP_(PRECISION=bf16|NUM_PROCESSES=2): this Trainer has"):
            of_lightning(devices, precision)
    assert of_lightning(2, "bf16-mixed").world_size == 2
    monkeypatch.delenv("NANO_LOOP_NUM_PROCESSES")
    for value, name, dtype in (("64", "64-true", torch.float64), ("bf16-true", "bf16-true", torch.bfloat16)):
        monkeypatch.setenv("NANO_LOOP_PRECISION", value)
        module, trainer = fitted(Trainer, DtypeNoting(), **NANO)
        assert (trainer.precision, module.seen) == (name, {dtype})  # only by Lightning's plugin
        assert not {"precision", "rounding"} & {*trainer.report.applied, *trainer.report.skipped}
        with pytest.raises(NanoConfigError, match=f"NANO_LOOP_PRECISION={value}: this Trainer has"):
            of_lightning()
    monkeypatch.setenv("NANO_LOOP_PRECISION", "auto")
    assert Trainer(precision=32, **QUIET).precision == "bf16-products"
    for precision in ("32-true", "bf16-mixed"):
        with pytest.raises(NanoConfigError, match="NANO_LOOP_PRECISION=auto: this Trainer has"):
            of_lightning(precision=precision)
    monkeypatch.setenv("NANO_LOOP_PRECISION", "32")  # removes the option of a strategy
    assert of_lightning(strategy=NanoStrategy(precision="auto")).strategy.settings().options.precision == "32-true"
    monkeypatch.setenv("NANO_LOOP_VERIFY", "1")
    with pytest.raises(NanoConfigError, match=r"NANO_LOOP_VERIFY=1.*Call nano_loop.verify"):
        Trainer(**QUIET)


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


needs_ipex = pytest.mark.skipif(not has_ipex(), reason="IPEX is in the environment of `make test-ipex` alone")


@pytest.mark.parametrize("more", [{}, pytest.param({"use_ipex": True}, marks=needs_ipex)])
def test_example_of_bf16_in_bigdl_nano_s_guide_works_word_for_word(tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)  # Lightning's logger and checkpoints are enabled
    model = LitNetwork()
    trainer = Trainer(max_epochs=5, precision="bf16", **more)
    trainer.fit(model, train_dataloaders=images())
    (found,) = trainer.validate(model, dataloaders=images())
    assert found["val_acc"] > 0.9
    assert not more or "ipex" in trainer.report.applied  # without it, another test of the process may have imported it
    assert trainer.checkpoint_callback.best_model_path


@pytest.mark.slow
def test_examples_of_the_page_run(tmp_path):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs/lightning.md").read_text(), flags=re.DOTALL)
    assert len(examples) == 2
    done = executed("\n".join(examples), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fused_optimizer" in done.stdout
    assert "val/loss" in done.stdout


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
@pytest.mark.slow
def test_without_lightning_the_error_names_what_to_install(name, tmp_path):
    program = f"""
import sys
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
import nano_loop
try:
    import nano_loop.{name}
except ImportError as error:
    print(error)
"""
    done = executed(program, tmp_path)
    assert f'pip install "{name.replace("_", "-")}>=2.5,' in done.stdout, done.stderr
