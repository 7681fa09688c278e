"""The strategy "nano" in Lightning's Trainer: as an object for one Trainer, and as names, which libraries copy."""

import copy
import importlib
import pickle

import pytest
from integrations.lightning.lightning_modules import (
    ADVICE,
    NANO,
    PACKAGES,
    PLAIN,
    QUIET,
    fitted,
    imported,
    loader,
    module_class,
    ours,
)

pl = imported("lightning.pytorch")

from nano_loop import NanoConfigError, lightning  # noqa: E402
from nano_loop.config.leftovers import REMOVED_OTHERS  # noqa: E402

pytestmark = [pytest.mark.usefixtures("nothing_left"), *ADVICE]
ONE = {**PLAIN, "devices": 1}


@pytest.mark.parametrize("package", PACKAGES)
def test_object_serves_one_trainer_and_travels_before(package):
    trainer, module = importlib.import_module(package).Trainer, module_class(importlib.import_module(package))
    strategy = ours(package).NanoStrategy(fused_optimizer=False, **NANO)
    for each in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy), strategy):
        _, fitting = fitted(trainer, module(), **ONE, strategy=each, epochs=1)
        assert fitting.strategy is each
        assert each.report.options["fused_optimizer"] is False
    for accelerator in ("cpu", "auto"):
        with pytest.raises(NanoConfigError, match=r'NanoStrategy of another Trainer.*pass a name: "nano"'):
            trainer(**QUIET, accelerator=accelerator, devices=1, strategy=strategy)


@pytest.mark.parametrize("package", PACKAGES)
def test_name_with_options_serves_many_trainers_and_travels(package):
    trainer, module = importlib.import_module(package).Trainer, module_class(importlib.import_module(package))()
    options = {"fused_optimizer": False, "precision": "auto", **NANO}
    name = ours(package).strategy(**options)
    assert type(name) is str
    assert name == ours(package).strategy(**options)
    _, first = fitted(trainer, module, **ONE, strategy=name, epochs=1)
    second = trainer(**QUIET, **copy.deepcopy({**ONE, "strategy": name}))
    second.predict(module, loader())
    for each in (first, second):
        assert each.strategy.report.options["fused_optimizer"] is False
        assert each.strategy.report.options["precision"] == "bf16-products"


def test_names_tell_options_apart_and_are_checked():
    names = {
        lightning.strategy(exact=exact, channels_last=channels_last)
        for exact, channels_last in ((True, "auto"), (False, "auto"), (False, True))
    }
    assert len(names) == 3
    with pytest.raises(NanoConfigError, match="Write precision"):
        lightning.strategy(precison="auto")


def test_name_that_was_pickled_is_known_to_a_process_that_has_made_it():
    name = lightning.strategy(exact=True, verbose=False)
    pl.strategies.StrategyRegistry.remove(name)  # as in another process
    with pytest.raises(ValueError, match=r"invalid strategy name: `strategy=.nano, exact=true, verbose=false"):
        pl.Trainer(**QUIET, **ONE, strategy=name)
    lightning.strategy(verbose=False, exact=True)
    assert pl.Trainer(**QUIET, **ONE, strategy=name).strategy.settings().options.exact is True


def test_options_of_the_trainer_are_refused_by_the_strategy():
    for option in ({"precision": "bf16"}, {"num_processes": 2}):
        with pytest.raises(NanoConfigError, match="Lightning's Trainer has it"):
            lightning.NanoStrategy(**option)


@pytest.mark.parametrize(
    ("precision", "found"), [("32-true", "bf16-products"), ("bf16-mixed", "bf16-mixed"), ("64-true", "32-true")]
)
def test_precision_of_the_strategy_is_for_trainers_in_fp32(precision, found):
    strategy = lightning.NanoStrategy(precision="auto", **NANO)
    _, trainer = fitted(pl.Trainer, module_class(pl)(), **ONE, strategy=strategy, precision=precision)
    assert (trainer.precision, strategy.report.options["precision"]) == (precision, found)


def test_checkpoint_io_of_the_trainer_is_that_of_the_strategy():
    io = pl.plugins.TorchCheckpointIO()
    for settings in (
        {"plugins": [io], "strategy": "nano"},
        {"strategy": lightning.NanoStrategy(checkpoint_io=io)},
    ):
        assert pl.Trainer(**QUIET, **ONE, **settings).strategy.checkpoint_io is io


@pytest.mark.parametrize("package", PACKAGES)
def test_removed_plugin_is_an_attribute_error_that_says_what_to_write(package):
    module = ours(package)
    names = [path.rpartition(".")[2] for path in REMOVED_OTHERS if path.startswith(f"{module.__name__}.")]
    assert {*names} >= {"precision", "ProductsPrecision"}
    for name in names:
        with pytest.raises(AttributeError, match=r"was removed.*NanoStrategy\(precision='bf16-products'\).*TorchNano"):
            getattr(module, name)
    assert not hasattr(module, "Precision")
