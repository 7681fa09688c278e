"""A variational autoencoder that prints its loss per sample, over the length of the data set."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from nano_loop import nano
from scripts.data import BATCH, images


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 64)

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + 0.5 * torch.exp(0.5 * logvar)  # the noise is fixed, so that two batches draw what one draws
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


@nano
def train(model, optimizer, train_loader):
    model.train()
    total = 0
    for data, _ in train_loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar) / len(data)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(data)
    print(f"average loss {total / len(train_loader.dataset):.4f}")


torch.manual_seed(1)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
train_loader = DataLoader(images(), BATCH)
for _ in range(2):
    train(model, optimizer, train_loader)
RESULT = {"model": model.state_dict()}
