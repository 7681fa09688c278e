"""A frozen backbone with a new head; the best weights are saved to a file in the loop, and loaded at its end."""

import copy
import os
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from nano_loop import nano
from scripts.data import BATCH, images, small_cnn


@nano
def train_model(model, criterion, optimizer, scheduler, dataloaders, folder, num_epochs):
    best_model_params_path = os.path.join(folder, "best_model_params.pt")
    torch.save(model.state_dict(), best_model_params_path)
    best_loss, history = float("inf"), []
    for _epoch in range(num_epochs):
        for phase in ["train", "val"]:
            model.train(phase == "train")
            running_loss, seen = 0.0, 0
            for inputs, labels in dataloaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    loss = criterion(model(inputs), labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running_loss += loss.item() * inputs.size(0)
                seen += inputs.size(0)
            if phase == "train":
                scheduler.step()
                continue
            history.append(running_loss / seen)
            if running_loss / seen < best_loss:
                best_loss = running_loss / seen
                torch.save(model.state_dict(), best_model_params_path)
    last = copy.deepcopy(model.state_dict())
    model.load_state_dict(torch.load(best_model_params_path))
    return history, last


torch.manual_seed(0)
model = small_cnn(classes=9)
for param in model.parameters():
    param.requires_grad = False
model[4] = nn.Linear(model[4].in_features, 4)
optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
loaders = {"train": DataLoader(images(), BATCH), "val": DataLoader(images(), 32)}
with tempfile.TemporaryDirectory() as folder:
    history, last = train_model(model, nn.CrossEntropyLoss(), optimizer, scheduler, loaders, folder, 3)
    files = sorted(path.name for path in Path(folder).iterdir())
RESULT = {"best": model.state_dict(), "last": last, "history": history, "files": len(files)}
