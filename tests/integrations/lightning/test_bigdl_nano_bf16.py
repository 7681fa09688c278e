"""The example of BigDL-Nano's guide of bf16, after the import is changed. It runs with IPEX too, so it is not slow."""

import pytest
from distributed.conftest import nothing_left  # noqa: F401 - a fixture
from integrations.lightning.lightning_modules import ADVICE
from integrations.lightning.test_bigdl_nano import LitNetwork, Trainer, images
from loops.pairs import has_ipex

pytestmark = [pytest.mark.usefixtures("nothing_left"), *ADVICE]
needs_ipex = pytest.mark.skipif(not has_ipex(), reason="IPEX is in the environment of `make test-ipex` alone")


@pytest.mark.parametrize("more", [{}, pytest.param({"use_ipex": True}, marks=needs_ipex)])
def test_the_guide_s_example_of_bf16_works_word_for_word(tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)  # Lightning's logger and checkpoints are on
    model = LitNetwork()
    trainer = Trainer(max_epochs=5, precision="bf16", **more)
    trainer.fit(model, train_dataloaders=images())
    (found,) = trainer.validate(model, dataloaders=images())
    assert found["val_acc"] > 0.9
    assert not more or "ipex" in trainer.report.applied  # without, another test of the process may have imported it
    assert trainer.checkpoint_callback.best_model_path
