"""A LightningModule trains as under plain Lightning, in one process and in two, and everything is the caller's."""

import copy
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from distributed.conftest import nothing_left  # noqa: F401 - a fixture
from integrations.lightning.lightning_modules import (
    ADVICE,
    PACKAGES,
    QUIET,
    Dealt,
    Items,
    Stream,
    imported,
    loader,
    loops,
    module_class,
    numbers,
    ours,
    saving_class,
    weights,
)
from loops.pairs import rounding_every_product
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl = imported("lightning.pytorch")

from nano_loop import NanoConfigError, NanoError, NanoWarning, NanoWorkerError  # noqa: E402
from nano_loop.config.leftovers import REMOVED  # noqa: E402
from nano_loop.kernels import rounding  # noqa: E402
from nano_loop.kernels.linear import product  # noqa: E402
from nano_loop.patching.operators.operators import gives_kernels  # noqa: E402

pytestmark = [pytest.mark.usefixtures("nothing_left"), *ADVICE]
Regression, Saving = module_class(pl), saving_class(pl)
ROOT = Path(__file__).parents[3]
PLAIN, NANO = {"accelerator": "cpu"}, {"verbose": False, "auto_lr": False}


def fitted(trainer, module=None, data=None, epochs=2, **settings):
    module = module or Regression()
    fitting = trainer(**{**QUIET, "max_epochs": epochs, **settings})
    fitting.fit(module, loader(shuffle=True) if data is None else data, loader())
    return module, fitting


def executed(program, folder, *before):
    """Run a script, or what `before` makes of it, such as torchrun."""
    (folder / "script.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, *before, "script.py"]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=folder, env=environment)


# --- one process ---


@pytest.mark.parametrize("package", [PACKAGES[0], pytest.param(PACKAGES[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", [32, "bf16"])
def test_it_trains_as_plain_lightning(package, precision):
    lightning = importlib.import_module(package)
    kind = module_class(lightning)
    plain = {32: "32-true", "bf16": "bf16-mixed"}[precision]
    expected, trainer = fitted(lightning.Trainer, kind(), **PLAIN, precision=plain)
    found, accelerated = fitted(ours(package).Trainer, kind(), **NANO, precision=precision)
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-6)
    assert "fused_optimizer" in accelerated.report.applied
    assert accelerated.callback_metrics["val"].item() == pytest.approx(trainer.callback_metrics["val"].item(), abs=1e-5)
    assert found.steps == expected.steps == 8
    named, _ = fitted(
        lightning.Trainer, kind(), **PLAIN, devices=1, precision=plain, strategy=ours(package).NanoStrategy(**NANO)
    )
    assert torch.equal(weights(named), weights(found))


def test_the_strategy_has_a_name_and_classes_are_as_before():
    class Imaging(Regression):
        """Has a layer for which channels_last surrounds the calls."""

        def __init__(self):
            super().__init__()
            self.unused = nn.Conv2d(1, 1, 1)

    ours(PACKAGES[0])  # whose import registers the name
    methods = {name: vars(Regression)[name] for name in ("forward", "training_step", "on_train_batch_end")}
    seen = []

    class Looking(pl.Callback):
        def on_train_batch_start(self, *_):
            seen.append({name: vars(Regression)[name] is method for name, method in methods.items()})

    fitted(pl.Trainer, **PLAIN, devices=1, strategy="nano")
    strategy = ours(PACKAGES[0]).NanoStrategy(channels_last=True, **NANO)
    module, _ = fitted(pl.Trainer, Imaging(), **PLAIN, devices=1, strategy=strategy, callbacks=[Looking()])
    assert seen[0] == {"forward": False, "training_step": False, "on_train_batch_end": True}
    assert all(vars(Regression)[name] is method for name, method in methods.items())
    assert type(module.head) is nn.Linear


@pytest.mark.parametrize("package", PACKAGES)
def test_object_serves_many_trainers_and_travels(package):
    lightning = importlib.import_module(package)
    strategy = ours(package).NanoStrategy(fused_optimizer=False, **NANO)
    kept = {**PLAIN, **QUIET, "strategy": strategy, "max_epochs": 1}
    first = lightning.Trainer(**kept, devices=1)
    module = module_class(lightning)()
    first.fit(module, loader())
    lightning.Trainer(**copy.deepcopy(kept), devices=1).predict(module, loader())
    sent = pickle.loads(pickle.dumps({**kept, "trainer": None}))
    del sent["trainer"]
    lightning.Trainer(**sent, devices=1).predict(module, loader())
    assert sent["strategy"].report.options["fused_optimizer"] is False
    second = lightning.Trainer(
        **kept, devices=2, precision="bf16-mixed", plugins=[lightning.plugins.TorchCheckpointIO()]
    )
    assert (second.world_size, second.precision, second.num_devices) == (2, "bf16-mixed", 2)
    first.fit_loop.max_epochs = 2
    first.fit(module, loader())
    assert (first.world_size, first.precision, strategy.report.options["precision"]) == (1, "32-true", "32-true")
    assert isinstance(strategy.checkpoint_io, lightning.plugins.TorchCheckpointIO)


def test_strategy_of_a_trainer_that_is_running_serves_no_other():
    strategy = ours(PACKAGES[0]).NanoStrategy(**NANO)

    class Nested(pl.Callback):
        def on_train_start(self, *_):
            with pytest.raises(NanoError, match="serves one at a time"):
                pl.Trainer(**PLAIN, strategy=strategy)

    fitted(pl.Trainer, **PLAIN, devices=1, strategy=strategy, epochs=1, callbacks=[Nested()])


@pytest.mark.parametrize("package", PACKAGES)
def test_name_with_options_serves_many_trainers_and_travels(package):
    lightning = importlib.import_module(package)
    name = ours(package).strategy(fused_optimizer=False, precision="auto", **NANO)
    kept = {**PLAIN, "devices": 1, "strategy": name}
    assert name.report is None
    module, trainer = fitted(lightning.Trainer, module_class(lightning)(), **copy.deepcopy(kept), epochs=1)
    lightning.Trainer(**{**QUIET, **pickle.loads(pickle.dumps(kept))}).predict(module, loader())
    assert trainer.strategy.report.options["fused_optimizer"] is False
    assert name.report.options["precision"] == "bf16-products"
    with pytest.raises(NanoConfigError, match="Write precision"):
        ours(package).strategy(precison="auto")


@pytest.mark.slow
def test_validate_test_and_predict_are_exact_and_fit_again_goes_on():
    expected, plain = fitted(pl.Trainer, **PLAIN)
    found, trainer = fitted(ours(PACKAGES[0]).Trainer, **NANO)
    for way in ("validate", "test"):
        results = [
            getattr(each, way)(module, loader(), verbose=False)
            for each, module in ((plain, expected), (trainer, found))
        ]
        assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    outputs = [torch.cat(each.predict(module, loader())) for each, module in ((plain, expected), (trainer, found))]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    for each, module in ((plain, expected), (trainer, found)):
        each.fit_loop.max_epochs = 4
        each.fit(module, loader(shuffle=True), loader())
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-6)


LOOPS = {
    **loops(pl, Regression),
    "LBFGS": (lambda: (Regression(optimizer="LBFGS", rate=0.1), []), {}),
    "a limit of batches": (lambda: (Regression(), []), {"limit_train_batches": 2, "val_check_interval": 1}),
    "an iterable dataset": (lambda: (Regression(), []), {"data": DataLoader(Stream(), 8)}),
    "a dataset of items": (lambda: (Regression(), []), {"data": DataLoader(Items(), 8)}),
}
QUICK = ("manual optimization",)


@pytest.mark.parametrize(
    "loop", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in LOOPS]
)
def test_loop_is_that_of_plain_lightning(loop):
    make, settings = LOOPS[loop]
    results = []
    for trainer, more in ((pl.Trainer, PLAIN), (ours(PACKAGES[0]).Trainer, NANO)):
        module, callbacks = make()
        results.append(weights(fitted(trainer, module, callbacks=callbacks, **more, **settings)[0]))
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)


@pytest.mark.parametrize("ways", [("plain", "nano"), pytest.param(("nano", "plain"), marks=pytest.mark.slow)])
def test_checkpoints_resume_in_the_other_one_in_mid_epoch(tmp_path, ways):
    trainers = {"plain": (pl.Trainer, PLAIN), "nano": (ours(PACKAGES[0]).Trainer, NANO)}

    def resumed(first, second):
        (trainer, more), path = trainers[first], tmp_path / f"{first}.ckpt"
        fitted(trainer, data=loader(), callbacks=[Saving(path)], **more)
        trainer, more = trainers[second]
        module, fitting = Regression(), trainer(**QUIET, max_epochs=3, **more)
        fitting.fit(module, loader(), loader(), ckpt_path=path)
        return weights(module), fitting.global_step

    (found, steps), (expected, of_plain) = resumed(*ways), resumed("plain", "plain")
    assert steps == of_plain > 8
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert Regression.load_from_checkpoint(tmp_path / f"{ways[0]}.ckpt", weights_only=False).hparams.width == 32


# --- compile ---


def compiled(**others):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return model, ours(PACKAGES[0]).Trainer.compile(model, nn.functional.mse_loss, optimizer, **others)


def test_compiled_model_is_trained_validated_tested_and_predicts():
    def distance(output, target):
        return (output - target).abs().mean()

    model, module = compiled(metrics=[distance])
    trainer = ours(PACKAGES[0]).Trainer(**QUIET, max_epochs=3, **NANO)
    trainer.fit(module, loader(), loader())
    assert {"train/loss", "val/loss", "val/distance_0"} <= trainer.callback_metrics.keys()
    (found,) = trainer.test(module, loader(), verbose=False)
    x, y = numbers()
    assert found["test/loss"] == pytest.approx(nn.functional.mse_loss(model(x), y).item(), rel=1e-4)
    assert found["test/distance_0"] == pytest.approx(distance(model(x), y).item(), rel=1e-4)
    for data in (loader(), DataLoader(TensorDataset(x), 8)):  # with a target, which is left out, and without
        torch.testing.assert_close(torch.cat(trainer.predict(module, data)), model(x))
    module.load_state_dict(model.state_dict())
    module.load_state_dict(module.state_dict())


def test_metrics_of_torchmetrics_are_computed_over_the_epoch_and_apart_for_each_stage():
    torchmetrics = pytest.importorskip("torchmetrics")
    model, module = compiled(metrics=[torchmetrics.MeanSquaredError()])
    trainer = ours(PACKAGES[0]).Trainer(**QUIET, max_epochs=1, **NANO)
    trainer.fit(module, loader(), loader(12))
    (found,) = trainer.validate(module, loader(12), verbose=False)  # whose last batch is smaller
    (of_test,) = trainer.test(module, loader(12, samples=16), verbose=False)
    x, y = numbers()
    assert found["val/MeanSquaredError_0"] == pytest.approx(nn.functional.mse_loss(model(x), y).item(), rel=1e-4)
    x, y = numbers(16)
    assert of_test["test/MeanSquaredError_0"] == pytest.approx(nn.functional.mse_loss(model(x), y).item(), rel=1e-4)


def test_target_is_never_an_argument_of_a_compiled_model():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x, mask=None):
            assert mask is None
            return self.layer(x)

    model = Masked()
    module = ours(PACKAGES[0]).Trainer.compile(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.01))
    fitted(ours(PACKAGES[0]).Trainer, module, **NANO)


@pytest.mark.parametrize("plateau", [False, True])
def test_scheduler_of_a_compiled_model_steps_once_an_epoch(plateau):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    kind = torch.optim.lr_scheduler.ReduceLROnPlateau if plateau else torch.optim.lr_scheduler.StepLR
    scheduler = kind(optimizer, patience=0, factor=0.5) if plateau else kind(optimizer, 1, 0.5)
    module = ours(PACKAGES[0]).Trainer.compile(model, lambda out, y: 0 * out.sum() + 1, optimizer, scheduler)
    fitted(ours(PACKAGES[0]).Trainer, module, epochs=3, **NANO)
    assert optimizer.param_groups[0]["lr"] == (0.25 if plateau else 0.125)


@pytest.mark.parametrize(
    ("setting", "count"), [({"interval": "step"}, 6), ({"interval": "epoch"}, 3), ({"frequency": 3}, 1), ({}, 3)]
)
def test_scheduler_of_a_compiled_model_may_be_lightnings_dict(setting, count):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    compile = ours(PACKAGES[0]).Trainer.compile
    module = compile(model, nn.MSELoss(), optimizer, {"scheduler": scheduler, **setting})
    fitted(ours(PACKAGES[0]).Trainer, module, epochs=3, limit_train_batches=2, **NANO)
    assert scheduler.last_epoch == count
    with pytest.raises(NanoConfigError, match="LRScheduler"):
        compile(model, nn.MSELoss(), optimizer, {"scheduler": "StepLR", **setting})


def test_lightning_module_compiles_to_itself_and_wrong_arguments_are_named():
    compile = ours(PACKAGES[0]).Trainer.compile
    module = Regression()
    assert compile(module) is module
    with pytest.raises(NanoConfigError, match="has its own loss"):
        compile(module, nn.MSELoss())
    with pytest.raises(NanoConfigError, match=r"(?s)loss=1.*optimizer='Adam'.*metrics"):
        compile(nn.Linear(1, 1), 1, "Adam", metrics=[3])
    with pytest.raises(NanoError, match="without an optimizer"):
        fitted(ours(PACKAGES[0]).Trainer, compile(nn.Linear(8, 1)), **NANO)
    model = nn.Linear(8, 1)
    with pytest.raises(NanoError, match="without a loss"):
        fitted(ours(PACKAGES[0]).Trainer, compile(model, optimizer=torch.optim.SGD(model.parameters(), 0.1)), **NANO)


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "ddp"}, "this Trainer has one"),
        ({"use_hpo": True}, "searches no hyperparameters"),
        ({"algorithms": [pl.Callback()]}, r"Pass callbacks=\[...\]"),
        ({"num_processes": 3, "cpu_for_each_process": [[0], [1]]}, "has 2 lists"),
        ({"accelerator": "gpu"}, "trains on CPUs"),
        ({"num_processes": 2, "devices": 3}, "both are the number of processes"),
        ({"channels_last": 3}, "channels_last=3"),
        *(({name: True}, f"{name}=True: it was removed.*Leave it out") for name in REMOVED),
        ({"num_processes": 0}, "num_processes=0"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises((NanoConfigError, ValueError), match=words):
        ours(PACKAGES[0]).Trainer(**QUIET, **arguments)


@pytest.mark.parametrize("shares", [[[0], [1]], ((0,), (1,)), 1])
def test_cpus_of_each_process_are_given_as_lists_or_as_their_number(shares):
    defaults = {"algorithms": None, "use_hpo": False}  # BigDL-Nano's
    trainer = ours(PACKAGES[0]).Trainer(num_processes=2, cpu_for_each_process=shares, **defaults, **QUIET)
    assert trainer.num_devices == 2


def test_options_of_the_trainer_are_refused_by_the_strategy():
    for option in ({"precision": "bf16"}, {"num_processes": 2}):
        with pytest.raises(NanoConfigError, match="Lightning's Trainer has it"):
            ours(PACKAGES[0]).NanoStrategy(**option)


def test_verify_is_refused_with_what_to_call_instead(monkeypatch):
    with pytest.raises(NanoConfigError, match=r"verify=True.*Call nano_loop.verify"):
        ours(PACKAGES[0]).Trainer(verify=True, **QUIET)
    monkeypatch.setenv("NANO_LOOP_VERIFY", "1")
    with pytest.raises(NanoConfigError, match=r"NANO_LOOP_VERIFY=1.*Call nano_loop.verify"):
        fitted(ours(PACKAGES[0]).Trainer, **NANO)


class DtypeNoting(Regression):
    def training_step(self, batch, index):
        self.seen = {each.dtype for each in self.parameters()}
        return super().training_step(batch, index)


def test_environment_overrides_our_trainer_and_must_not_contradict_lightning_s(monkeypatch):
    monkeypatch.setenv("NANO_LOOP_PRECISION", "bf16")
    monkeypatch.setenv("NANO_LOOP_NUM_PROCESSES", "2")
    trainer = ours(PACKAGES[0]).Trainer(1, precision=32, **QUIET)
    assert (trainer.precision, trainer.world_size) == ("bf16-mixed", 2)
    for devices, precision in ((2, "32-true"), (3, "bf16-mixed")):
        with pytest.raises(NanoConfigError, match=r"NANO_LOOP_(PRECISION=bf16|NUM_PROCESSES=2): this Trainer has"):
            pl.Trainer(**QUIET, **PLAIN, strategy="nano", devices=devices, precision=precision)
    assert pl.Trainer(**QUIET, **PLAIN, strategy="nano", devices=2, precision="bf16-mixed").world_size == 2
    monkeypatch.delenv("NANO_LOOP_NUM_PROCESSES")
    for value, name, dtype in (("64", "64-true", torch.float64), ("bf16-true", "bf16-true", torch.bfloat16)):
        monkeypatch.setenv("NANO_LOOP_PRECISION", value)
        module, trainer = fitted(ours(PACKAGES[0]).Trainer, DtypeNoting(), **NANO)
        assert (trainer.precision, module.seen) == (name, {dtype})  # by Lightning's plugin alone
        assert not {"precision", "rounding"} & {*trainer.report.applied, *trainer.report.skipped}
        with pytest.raises(NanoConfigError, match=f"NANO_LOOP_PRECISION={value}: this Trainer has"):
            pl.Trainer(**QUIET, **PLAIN, strategy="nano", devices=1, precision="32-true")


@pytest.mark.parametrize("package", [PACKAGES[0], pytest.param(PACKAGES[1], marks=pytest.mark.slow)])
def test_products_round_by_our_trainer_and_as_a_plugin_of_lightnings_and_fabrics(package, monkeypatch):
    """Each rounds as often, sees fp32 alone, and leaves nothing behind."""
    if product.KERNEL.unavailable or not gives_kernels():
        pytest.skip("products do not round here")
    rounding_every_product(monkeypatch)
    counts, note = Counter(), rounding.Rounding.__call__

    def noting(self, *args):
        counts[name] += 1
        note(self, *args)

    monkeypatch.setattr(rounding.Rounding, "__call__", noting)
    lightning, own = importlib.import_module(package), ours(package)
    kind = module_class(lightning)

    class Seen(kind):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.seen = {loss.dtype, *(each.dtype for each in self.parameters())}
            return loss

    trainers = {
        "ours": (own.Trainer, {**NANO, "precision": "bf16-products"}),
        "the strategy": (lightning.Trainer, {**PLAIN, "strategy": "nano", "devices": 1}),
        "lightning's": (lightning.Trainer, {**PLAIN, "devices": 1}),
    }
    for name, (trainer, settings) in trainers.items():
        plugins = {} if name == "ours" else {"plugins": own.precision("bf16-products")}
        module, trainer = fitted(trainer, Seen(), **settings, **plugins)
        assert trainer.precision == "bf16-products"
        assert module.seen == {torch.float32}
    assert set(counts) == set(trainers)
    assert len(set(counts.values())) == 1
    name = "fabric"
    plugin = own.precision("bf16-products")
    fabric = importlib.import_module(
        package.replace("pytorch_lightning", "lightning_fabric").replace("lightning.pytorch", "lightning.fabric")
    ).Fabric(accelerator="cpu", devices=1, plugins=plugin)
    layer = fabric.setup(nn.Linear(32, 32))
    assert layer(torch.ones(32, 32)).dtype is torch.float32
    plugin.teardown()
    before = counts[name]
    assert before
    layer(torch.ones(32, 32))
    assert counts[name] == before
    with pytest.raises(NanoConfigError, match="bf16-mixed"):
        own.precision("bf16-mixed")


@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.Linear(512, 512).double()], ids=["small", "double"])
def test_module_whose_products_cannot_round_is_named_by_the_plugin(layer):
    with pytest.warns(NanoWarning, match="'bf16-products' for Linear"):
        assert ours(PACKAGES[0]).precision("bf16-products").convert_module(layer) is layer


def test_module_of_the_other_package_is_refused_by_lightning():
    other = module_class(importlib.import_module(PACKAGES[1]))()
    with pytest.raises(TypeError, match="LightningModule"):
        fitted(ours(PACKAGES[0]).Trainer, other, **NANO)


def test_auto_precision_rounds_products_and_others_are_lightnings():
    assert ours(PACKAGES[0]).Trainer(**QUIET, precision="auto").precision == "bf16-products"
    assert ours(PACKAGES[0]).Trainer(**QUIET, precision="64-true").precision == "64-true"


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
    assert f'pip install "nano-loop[{name.replace("_", "-")}]"' in done.stdout, done.stderr


# --- several processes ---


class Marking(pl.Callback):
    def __init__(self):
        self.epochs, self.ranks = 0, set()

    def on_train_epoch_end(self, trainer, module):
        self.epochs += 1
        self.ranks.add((trainer.global_rank, trainer.world_size))


class InTurn(Regression):
    """Makes its loader itself, with a sampler for its rank."""

    def train_dataloader(self):
        rank, count = self.trainer.global_rank, self.trainer.world_size
        return loader(8 // count, sampler=Dealt(32, rank, count))


@pytest.mark.slow
def test_two_ranks_equal_one_with_the_double_batch_and_all_is_the_caller_s(tmp_path):
    def callbacks():
        stopping = pl.callbacks.EarlyStopping("val", patience=1, min_delta=1000.0)
        return [Marking(), stopping, pl.callbacks.ModelCheckpoint(tmp_path / "best", monitor="val", filename="{epoch}")]

    settings = {**QUIET, "enable_checkpointing": True, "max_epochs": 5, "use_distributed_sampler": False}
    results = []
    for trainer, more in ((pl.Trainer, PLAIN), (ours(PACKAGES[0]).Trainer, {**NANO, "num_processes": 2})):
        module = InTurn()
        fitting = trainer(**settings, callbacks=callbacks(), **more)
        fitting.fit(module, val_dataloaders=loader())
        results.append((module, fitting))
    (expected, plain), (found, nano) = results
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-6)
    assert nano.callback_metrics["val"].item() == pytest.approx(plain.callback_metrics["val"].item(), abs=1e-5)
    assert nano.current_epoch == plain.current_epoch == 2  # stopped early
    assert os.path.exists(nano.checkpoint_callback.best_model_path)
    assert nano.callbacks[0].epochs == 2
    assert nano.callbacks[0].ranks == {(0, 2)}
    assert "gradient_averaging" in nano.report.applied
    (exact,) = nano.validate(found, loader(), verbose=False)  # in this process alone
    assert exact["val"] == pytest.approx(plain.validate(expected, loader(), verbose=False)[0]["val"], abs=1e-5)
    assert "gradient_averaging" not in nano.report.applied
    before = weights(found).clone()
    nano.fit_loop.max_epochs = 6
    nano.should_stop = False
    nano.fit(found, val_dataloaders=loader())  # a second time, from the same process
    assert not torch.equal(weights(found), before)


class Counting(Regression):
    """Counts the rows that this rank is given."""

    def __init__(self):
        super().__init__()
        self.trained = self.validated = 0

    def training_step(self, batch, index):
        self.trained += len(batch[0])
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        self.validated += len(batch[0])
        super().validation_step(batch, index)


@pytest.mark.slow
@pytest.mark.parametrize(("sanity_steps", "before"), [(0, 0), (2, 16)])
def test_stream_is_divided_in_training_and_whole_in_validation(sanity_steps, before):
    module, data = Counting(), [DataLoader(Stream(), 8) for _ in range(2)]
    trainer = ours(PACKAGES[0]).Trainer(2, **QUIET, **NANO, max_epochs=2, num_sanity_val_steps=sanity_steps)
    trainer.fit(module, *data)
    assert (module.trained, module.validated) == (2 * 32 // 2, before + 2 * 32)


class Failing(Regression):
    def __init__(self, rank, what):
        super().__init__()
        self.rank, self.what = rank, what

    def training_step(self, batch, index):
        if (self.trainer.global_rank, index) == (self.rank, 1):
            if self.what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "returns None":
                return None
            raise KeyError(f"row of rank {self.rank}")
        return super().training_step(batch, index)


@pytest.mark.parametrize(
    ("rank", "what", "error", "words"),
    [
        (0, "raises", KeyError, "row of rank 0"),
        (1, "raises", NanoWorkerError, "rank 1 raised KeyError: 'row of rank 1'"),
        pytest.param(1, "killed", NanoWorkerError, "rank 1 was killed", marks=pytest.mark.slow),
        pytest.param(1, "returns None", NanoWorkerError, "rank 1 raised RuntimeError", marks=pytest.mark.slow),
    ],
)
def test_failure_of_a_rank_ends_fit(rank, what, error, words):
    with pytest.raises(error, match=words):
        fitted(ours(PACKAGES[0]).Trainer, Failing(rank, what), num_processes=2, **NANO)
    assert not torch.distributed.is_initialized()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_callback_that_cannot_be_pickled_is_named():
    class Holding(pl.Callback):
        def __init__(self):
            self.lock = threading.Lock()

    with pytest.raises(NanoWorkerError, match=r"callbacks \(Holding\)"):
        fitted(ours(PACKAGES[0]).Trainer, callbacks=[Holding()], num_processes=2, **NANO)


SCRIPT = """
import os, signal, sys
import torch
import lightning.pytorch as pl  # before nano_loop, which imports another copy of Fabric
from nano_loop.lightning import Trainer
from integrations.lightning.lightning_modules import QUIET, Dealt, loader, module_class, weights

class Module(module_class(pl)):
    def train_dataloader(self):
        rank, count = self.trainer.global_rank, self.trainer.world_size
        return loader(8 // count, sampler=Dealt(32, rank, count))

    def training_step(self, batch, index):
        if "interrupted" in sys.argv and (self.trainer.global_rank, index) == (0, 2):
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, index)

if __name__ == "__main__":
    module = Module()
    launched = "WORLD_SIZE" in os.environ
    trainer = Trainer(None if launched else COUNT, **QUIET, max_epochs=2, auto_lr=False, use_distributed_sampler=False)
    assert trainer.is_global_zero == (os.environ.get("RANK", "0") == "0")
    trainer.fit(module, val_dataloaders=loader())
    (found,) = trainer.validate(module, loader(), verbose=False)
    if trainer.is_global_zero:
        print("sum", weights(module).double().sum().item(), "val", found["val"])
"""


@pytest.mark.slow
@pytest.mark.timeout(400)  # 35 s on a quiet machine: four processes import Lightning
def test_ranks_of_torchrun_train_as_one_process_and_ctrl_c_ends_a_run_of_two(tmp_path):
    one = executed(SCRIPT.replace("COUNT", "1"), tmp_path)
    two = executed(SCRIPT, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    numbers = [[float(each) for each in re.findall(r"(?:sum|val) (-?[\d.]+)", done.stdout)] for done in (one, two)]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-4), (one.stderr, two.stderr)
    assert len(numbers[0]) == 2
    done = executed(SCRIPT.replace("COUNT", "2").replace('"interrupted" in sys.argv', "True"), tmp_path)
    assert done.returncode == 1
    assert "Detected KeyboardInterrupt" in done.stdout + done.stderr
