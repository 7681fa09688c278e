"""``fit`` in two processes: the results are the caller's afterwards, and a failure in a process ends the run."""

import os
import re
import signal
import threading

import pytest
import torch
from distributed.launch.started import torchrun
from integrations.lightning.lightning_modules import (
    ADVICE,
    NANO,
    PLAIN,
    QUIET,
    Stream,
    data_class,
    executed,
    fitted,
    imported,
    loader,
    module_class,
    weights,
)
from torch.utils.data import DataLoader

pl = imported("lightning.pytorch")

from nano_loop import NanoWorkerError  # noqa: E402
from nano_loop.lightning import Trainer  # noqa: E402
from nano_loop.patching.operators import gives_kernels  # noqa: E402

pytestmark = [pytest.mark.usefixtures("nothing_left"), *ADVICE]
Regression, Dealing = module_class(pl), data_class(pl)
TWO = {**NANO, "num_processes": 2}


class Marking(pl.Callback):
    def __init__(self):
        self.epochs, self.ranks = 0, set()

    def on_train_epoch_end(self, trainer, module):
        self.epochs += 1
        self.ranks.add((trainer.global_rank, trainer.world_size))


@pytest.mark.slow
def test_callbacks_metrics_and_checkpoints_are_the_caller_s_and_fit_again_goes_on(tmp_path):
    def trained(kind, more):
        stopping = pl.callbacks.EarlyStopping("val", patience=1, min_delta=1000.0)
        saving = pl.callbacks.ModelCheckpoint(tmp_path / "best", monitor="val", filename="{epoch}")
        settings = {"enable_checkpointing": True, "use_distributed_sampler": False, **more}
        return fitted(kind, Regression(), Dealing(), epochs=5, callbacks=[Marking(), stopping, saving], **settings)

    (expected, plain), (found, nano) = trained(pl.Trainer, PLAIN), trained(Trainer, TWO)
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-6)
    assert nano.callback_metrics["val"].item() == pytest.approx(plain.callback_metrics["val"].item(), abs=1e-5)
    assert nano.current_epoch == plain.current_epoch == 2  # stopped early
    assert os.path.exists(nano.checkpoint_callback.best_model_path)
    assert nano.callbacks[0].epochs == 2
    assert nano.callbacks[0].ranks == {(0, 2)}
    assert "gradient_averaging" in nano.report.applied
    (exact,) = nano.validate(found, loader(), verbose=False)  # only in this process
    assert exact["val"] == pytest.approx(plain.validate(expected, loader(), verbose=False)[0]["val"], abs=1e-5)
    assert "gradient_averaging" not in nano.report.applied
    before = weights(found).clone()
    nano.fit_loop.max_epochs = 6
    nano.should_stop = False
    nano.fit(found, val_dataloaders=loader(), train_dataloaders=loader())  # a second time, from the same process
    assert not torch.equal(weights(found), before)


class Counting(Regression):
    """Counts the rows that this rank gets."""

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
    trainer = Trainer(**QUIET, **TWO, max_epochs=2, num_sanity_val_steps=sanity_steps)
    trainer.fit(module, *data)
    assert (module.trained, module.validated) == (2 * 32 // 2, before + 2 * 32)


class Exact(Regression):
    def loss(self, batch):
        return super().loss([each.double() for each in batch])


needs_kernels = pytest.mark.skipif(not gives_kernels(), reason="torch does not say which kernel an operator has")
ACCUMULATING = {"epochs": 2, "accumulate_grad_batches": 2}


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "off"), [("SGD", 1e-12), ("Adam", 1e-9)])
def test_ranks_that_share_each_batch_train_as_one_process(optimizer, off):
    def trained(kind, more):
        module = Exact(optimizer=optimizer).double()
        module, trainer = fitted(kind, module, loader(7, shuffle=True), **ACCUMULATING, **more)
        return weights(module), trainer

    (expected, plain), (found, nano) = trained(pl.Trainer, PLAIN), trained(Trainer, {**TWO, "split_batches": True})
    assert (found - expected).abs().max() <= off * expected.abs().max()
    assert nano.global_step == plain.global_step
    assert nano.callback_metrics["val"].item() == pytest.approx(plain.callback_metrics["val"].item(), abs=1e-5)
    assert nano.report["loaders"].status == "applied"
    assert nano.report["split_batches"].status == "applied"


OF_TORCHRUN = """
import torch
from integrations.lightning.lightning_modules import NANO
from integrations.lightning.test_launching import ACCUMULATING, Exact, Trainer, fitted, loader, weights

module = Exact(optimizer="SGD").double()
module, trainer = fitted(Trainer, module, loader(7, shuffle=True), **ACCUMULATING, **NANO, split_batches=True)
if trainer.is_global_zero:
    torch.save((weights(module), trainer.world_size), "found.pt")
"""


@needs_kernels
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_of_torchrun_that_share_each_batch_train_as_one_process(tmp_path, size):
    done = executed(OF_TORCHRUN, tmp_path, *torchrun("--standalone", "--nproc-per-node", size)[1:])
    assert done.returncode == 0, done.stderr
    found, ranks = torch.load(tmp_path / "found.pt", weights_only=True)
    expected = weights(
        fitted(pl.Trainer, Exact(optimizer="SGD").double(), loader(7, shuffle=True), **ACCUMULATING, **PLAIN)[0]
    )
    assert ranks == size
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


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
        pytest.param(0, "raises", KeyError, "row of rank 0", marks=pytest.mark.slow),
        (1, "raises", NanoWorkerError, "rank 1 raised KeyError: 'row of rank 1'"),
        pytest.param(1, "killed", NanoWorkerError, "rank 1 was killed", marks=pytest.mark.slow),
        pytest.param(1, "returns None", NanoWorkerError, "rank 1 raised RuntimeError", marks=pytest.mark.slow),
    ],
)
def test_failure_of_a_rank_ends_fit(rank, what, error, words):
    with pytest.raises(error, match=words):
        fitted(Trainer, Failing(rank, what), **TWO)
    assert not torch.distributed.is_initialized()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_callback_that_cannot_be_pickled_is_named():
    class Holding(pl.Callback):
        def __init__(self):
            self.lock = threading.Lock()

    with pytest.raises(NanoWorkerError, match=r"callbacks \(Holding\)"):
        fitted(Trainer, Regression(), callbacks=[Holding()], **TWO)


SCRIPT = """
import os, signal, sys
import torch
import lightning.pytorch as pl  # before nano_loop, which imports another copy of Fabric
from nano_loop.lightning import Trainer  # noqa: E402
from integrations.lightning.lightning_modules import QUIET, data_class, loader, module_class, weights

class Module(module_class(pl)):
    def training_step(self, batch, index):
        if "interrupted" in sys.argv and (self.trainer.global_rank, index) == (0, 2):
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, index)

if __name__ == "__main__":
    module = Module()
    launched = "WORLD_SIZE" in os.environ
    trainer = Trainer(None if launched else COUNT, **QUIET, max_epochs=2, auto_lr=False, use_distributed_sampler=False)
    assert trainer.is_global_zero == (os.environ.get("RANK", "0") == "0")
    trainer.fit(module, data_class(pl)())
    (found,) = trainer.validate(module, loader(), verbose=False)
    if trainer.is_global_zero:
        print("sum", weights(module).double().sum().item(), "val", found["val"])
"""


@pytest.mark.slow
@pytest.mark.timeout(400)  # 35 s on an idle machine: four processes import Lightning
def test_ranks_of_torchrun_train_as_one_process_and_ctrl_c_ends_a_run_of_two(tmp_path):
    one = executed(SCRIPT.replace("COUNT", "1"), tmp_path)
    two = executed(SCRIPT, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    numbers = [[float(each) for each in re.findall(r"(?:sum|val) (-?[\d.]+)", done.stdout)] for done in (one, two)]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-4), (one.stderr, two.stderr)
    assert len(numbers[0]) == 2
    done = executed(SCRIPT.replace("COUNT", "2").replace('"interrupted" in sys.argv', "True"), tmp_path)
    assert done.returncode == 1
    assert "Detected KeyboardInterrupt" in done.stdout + done.stderr
