"""Systems with other libraries' trainers: Lightning's and Hugging Face's, plain and with nano_loop."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.loop import endless
from benchmarks.workloads import Workload


def lightning(work: Workload, count: int) -> list[float]:
    """Lightning's Trainer in fp32."""
    return _lightning(work, count, precision="32-true", accelerator="cpu")


def lightning_bf16(work: Workload, count: int) -> list[float]:
    """Lightning's Trainer in ``bf16-mixed``."""
    return _lightning(work, count, precision="bf16-mixed", accelerator="cpu")


def nano_lightning(work: Workload, count: int) -> list[float]:
    """`nano_loop.lightning.Trainer` in bf16, and with channels_last for images."""
    from nano_loop.lightning import Trainer

    return _lightning(work, count, Trainer, precision="bf16", channels_last=work.images, verbose=False)


def _lightning(work: Workload, count: int, kind: Any = None, **options: Any) -> list[float]:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return work.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer

    class Timed(_Times, pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            self.begin()

        def on_train_batch_end(self, *_: Any) -> None:
            self.note()

    timed = Timed()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = (kind or pl.Trainer)(
        max_steps=count, max_epochs=-1, callbacks=[timed], enable_model_summary=False, **quiet, **options
    )
    trainer.fit(Module(), _stream(work))
    return timed.seconds


def hugging_face(work: Workload, count: int) -> list[float]:
    """Hugging Face's Trainer in fp32."""
    return _hugging_face(work, count, nullcontext())


def hugging_face_bf16(work: Workload, count: int) -> list[float]:
    """Hugging Face's Trainer with ``bf16=True``."""
    return _hugging_face(work, count, nullcontext(), bf16=True)


def nano_hugging_face(work: Workload, count: int) -> list[float]:
    """Hugging Face's Trainer inside `nano_loop.accelerated` in bf16."""
    import nano_loop

    options = {"precision": "bf16", "channels_last": work.images, "verbose": False}
    return _hugging_face(work, count, nano_loop.accelerated(work.model, **options))


def _hugging_face(work: Workload, count: int, around: AbstractContextManager[Any], **options: Any) -> list[float]:
    """Train as `steps` does: no clipping, a constant rate; the optimizer is the Trainer's own AdamW, a fused one."""
    import transformers

    class Trainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            return work.loss(model, inputs["batch"])

        def get_train_dataloader(self) -> Any:
            return _stream(work, lambda batch: {"batch": batch})

        def _get_grad_norm(self, *_: Any, **__: Any) -> None:
            """Omit the norm, which it computes for its log even without clipping; `steps` does not."""

    class Timed(_Times, transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.note()

    timed = Timed()
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
        same = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "learning_rate": 1e-4}
        arguments = transformers.TrainingArguments(folder, max_steps=count, use_cpu=True, **quiet, **same, **options)
        trainer = Trainer(work.model, arguments, train_dataset=_Stream(work), callbacks=[timed])
        with around:
            trainer.train()
    return timed.seconds


class _Times:
    """The seconds of each step, from the end of the previous one, including the loading of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._last = 0.0

    def begin(self) -> None:
        self._last = time.perf_counter()

    def note(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


class _Stream(IterableDataset[Any]):
    """A workload's batches of all epochs as one epoch: a trainer's work once per epoch belongs to no step."""

    def __init__(self, work: Workload, made: Callable[[Any], Any] = lambda batch: batch) -> None:
        self._work, self._made = work, made

    def __iter__(self) -> Iterator[Any]:
        return map(self._made, endless(self._work.batches))


def _stream(work: Workload, made: Callable[[Any], Any] = lambda batch: batch) -> DataLoader[Any]:
    return DataLoader(_Stream(work, made), batch_size=None)


#: By name, in the order of the tables.
SYSTEMS: dict[str, Callable[[Workload, int], list[float]]] = {
    each.__name__: each
    for each in (lightning, lightning_bf16, nano_lightning, hugging_face, hugging_face_bf16, nano_hugging_face)
}
OURS = ("nano_lightning", "nano_hugging_face")
