"""Images by Keras, pytorch-metric-learning, fastai and timm."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.libraries.programs import Fit, Trained, pictures, program

#: How the report names optimizers of Keras and fastai.
FOREIGN = "trained by an optimizer that is not a torch optimizer"


@program("keras", f"Sequential, {FOREIGN}")
def keras(small: bool) -> Fit:
    """A convolutional network."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    from keras import layers

    x, y = pictures(128 if small else 1024, 10, (28, 28, 1))
    wide = 8 if small else 32
    model = keras.Sequential(
        [
            layers.Conv2D(wide, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(2 * wide, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.5, seed=0),
            layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def fit() -> Trained:
        history = model.fit(x, y, batch_size=16 if small else 64, epochs=1 if small else 4, verbose=0)
        return Trained([model], history.history["loss"][-1])

    return fit


@program("pytorch-metric-learning", "Sequential, trained by Adam", "ArcFaceLoss, trained by SGD")
def metric_learning(small: bool) -> Fit:
    """ArcFace over a convolutional network."""
    from pytorch_metric_learning.losses import ArcFaceLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner

    wide = 8 if small else 64
    x, y = map(torch.from_numpy, pictures(128 if small else 1024, 10, (1, 28, 28)))
    model = nn.Sequential(
        nn.Conv2d(1, wide, 3),
        nn.ReLU(),
        nn.Conv2d(wide, wide, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(144 * wide, 128),
    )
    criterion, miner = ArcFaceLoss(10, 128), MultiSimilarityMiner()
    optimizers = torch.optim.Adam(model.parameters(), 1e-3), torch.optim.SGD(criterion.parameters(), 0.01)
    loader = DataLoader(TensorDataset(x, y), 64, shuffle=True)

    def fit() -> Trained:
        for _ in range(1 if small else 2):
            for images, labels in loader:
                embeddings = model(images)
                loss = criterion(embeddings, labels, miner(embeddings, labels))
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
        return Trained([model, criterion], loss.item())

    return fit


@program("fastai", f"XResNet, {FOREIGN}", torch="2.8")
def fastai(small: bool) -> Fit:
    """xResNet-18."""
    from fastai.vision.all import DataLoaders, Learner, xresnet18

    x, y = map(torch.from_numpy, pictures(64 if small else 256, 10, (3, 64, 64)))
    data = [*zip(x, y, strict=True)]
    loaders = DataLoaders.from_dsets(data, data[:32], bs=8 if small else 32, num_workers=0, device="cpu")
    learner = Learner(loaders, xresnet18(n_out=10), loss_func=nn.CrossEntropyLoss())

    def fit() -> Trained:
        with learner.no_bar(), learner.no_logging():
            learner.fit_one_cycle(1)
        return Trained([learner.model], float(learner.recorder.losses[-1]))

    return fit


@program("timm", "ResNet, trained by AdamW", torch="2.8")
def timm(small: bool) -> Fit:
    """ResNet-18."""
    import timm
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    x, y = map(torch.from_numpy, pictures(32 if small else 192, 10, (3, 64, 64)))
    model = timm.create_model("resnet10t" if small else "resnet18", num_classes=10).train()
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, 10)
    criterion = LabelSmoothingCrossEntropy(0.1)
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True)

    def fit() -> Trained:
        for epoch in range(1):
            for images, labels in loader:
                loss = criterion(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            scheduler.step(epoch + 1)
        return Trained([model], loss.item())

    return fit
