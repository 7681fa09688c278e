"""A siamese net over pairs, which a data set of the script's own makes, with a batch sampler and a collate function."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from nano_loop import nano
from scripts.data import BATCH, images


class Pairs(Dataset):
    def __init__(self):
        self.images, self.labels = images().tensors

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        other = (7 * index + 3) % len(self)
        return {"pair": (self.images[index], self.images[other]), "same": self.labels[index] == self.labels[other]}


def collate(samples):
    first, second = (torch.stack(side) for side in zip(*(each["pair"] for each in samples), strict=True))
    return first, second, torch.stack([each["same"] for each in samples]).float()


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.PReLU(), nn.Flatten(), nn.Linear(144, 6))

    def forward_once(self, x):
        return F.normalize(self.net(x), dim=1)

    def forward(self, a, b):
        return self.forward_once(a), self.forward_once(b)


@nano
def train(model, train_loader, optimizer, epoch):
    for first, second, same in train_loader:
        optimizer.zero_grad()
        a, b = model(first, second)
        distance = F.pairwise_distance(a, b)
        loss = torch.mean(same * distance.pow(2) + (1 - same) * F.relu(1.0 - distance).pow(2))
        loss.backward()
        optimizer.step()


torch.manual_seed(0)
pairs = Pairs()
batches = BatchSampler(SequentialSampler(pairs), BATCH, drop_last=False)
loader = DataLoader(pairs, batch_sampler=batches, collate_fn=collate)
model = SiameseNetwork()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
for epoch in range(2):
    train(model, loader, optimizer, epoch)
RESULT = {"model": model.state_dict()}
