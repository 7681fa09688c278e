"""Tables of numbers: TabNet, skorch, cells by scvi-tools, and clicks by RecBole."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.libraries.programs import Fit, Trained, columns, program


@program("pytorch-tabnet", "TabNet, trained by Adam")
def tabnet(small: bool) -> Fit:
    """TabNet."""
    from pytorch_tabnet.tab_model import TabNetClassifier

    x, y = columns(1024 if small else 8192, 32, 3)
    epochs, batch, virtual = (2, 256, 64) if small else (20, 1024, 128)
    model = TabNetClassifier(seed=0, verbose=0, device_name="cpu")

    def fit() -> Trained:
        model.fit(x, y, max_epochs=epochs, batch_size=batch, virtual_batch_size=virtual)
        return Trained([model.network], float(model.history["loss"][-1]))

    return fit


@program("skorch", "Sequential, trained by Adam")
def skorch(small: bool) -> Fit:
    """A classifier of three layers."""
    x, y = columns(1024 if small else 16384, 32, 3)
    model = classifier(64 if small else 512, max_epochs=2 if small else 6)

    def fit() -> Trained:
        model.fit(x, y)
        return Trained([model.module_], model.history[-1, "train_loss"])

    return fit


@program("skorch", "Sequential, trained by Adam")
def skorch_search(small: bool) -> Fit:
    """A grid search in two processes."""
    from sklearn.model_selection import GridSearchCV

    x, y = columns(512 if small else 8192, 32, 3)
    model = classifier(64 if small else 512, max_epochs=2)
    search = GridSearchCV(model, {"lr": [1e-2, 1e-3]}, cv=2, n_jobs=2)

    def fit() -> Trained:
        search.fit(x, y)
        best = search.best_estimator_
        return Trained([best.module_], best.history[-1, "train_loss"])

    return fit


def classifier(width: int, max_epochs: int) -> Any:
    """Return a classifier of skorch for tables of 32 columns and three classes."""
    from skorch import NeuralNetClassifier

    torch.manual_seed(0)
    layers = nn.Linear(32, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    return NeuralNetClassifier(
        nn.Sequential(*layers),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=1e-3,
        max_epochs=max_epochs,
        train_split=None,
        verbose=0,
    )


@program("scvi-tools", "VAE, trained by Adam")
def scvi(small: bool) -> Fit:
    """SCVI's autoencoder."""
    import anndata
    import scvi

    cells, genes = (300, 100) if small else (2000, 1000)
    data = anndata.AnnData(np.random.default_rng(0).poisson(1.0, (cells, genes)).astype("float32"))
    if scvi.settings.seed is None:  # each time, it adds to a variable of the environment
        scvi.settings.seed = 0
    scvi.model.SCVI.setup_anndata(data)
    model = scvi.model.SCVI(data, n_hidden=32 if small else 128)

    def fit() -> Trained:
        model.train(max_epochs=2 if small else 8, accelerator="cpu", enable_progress_bar=False)
        return Trained([model.module], float(np.asarray(model.history["train_loss"])[-1, 0]))

    return fit


@program("recbole", "Embedding, trained by Adam", torch="2.8")
def bpr(small: bool) -> Fit:
    """BPR."""
    return _recommender("BPR", small, 15)


@program(
    "recbole", *(f"{part}, trained by Adam" for part in ("Embedding", "LayerNorm", "TransformerEncoder")), torch="2.8"
)
def sasrec(small: bool) -> Fit:
    """SASRec."""
    return _recommender("SASRec", small, 1, train_neg_sample_args=None, MAX_ITEM_LIST_LENGTH=20)


def _recommender(kind: str, small: bool, epochs: int, **settings: Any) -> Fit:
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.utils import get_model, get_trainer, init_seed

    users, items, clicks = (30, 100, 10) if small else (500, 1000, 60)
    random = np.random.default_rng(0)
    lines = ["user_id:token\titem_id:token\ttimestamp:float"]
    for user in range(users):
        lines += [f"{user}\t{item}\t{at}" for at, item in enumerate(random.choice(items, clicks, replace=False))]
    folder = tempfile.TemporaryDirectory()
    with contextlib.chdir(folder.name):  # where it writes logs
        Path("toy").mkdir()
        Path("toy/toy.inter").write_text("\n".join(lines) + "\n")
        settings |= {
            "data_path": folder.name,
            "checkpoint_dir": folder.name,
            "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
            "epochs": 1 if small else epochs,
            "train_batch_size": 128 if small else 1024,
            "use_gpu": False,
            "show_progress": False,
            "state": "ERROR",
        }
        config = Config(model=kind, dataset="toy", config_dict=settings)
        init_seed(0, True)
        train, _, _ = data_preparation(config, create_dataset(config))
        model = get_model(kind)(config, train.dataset)
        trainer = get_trainer(config["MODEL_TYPE"], kind)(config, model)

    def fit() -> Trained:
        with contextlib.chdir(folder.name):
            trainer.fit(train, verbose=False, saved=False)
        return Trained([model], trainer.train_loss_dict[max(trainer.train_loss_dict)])

    return fit
