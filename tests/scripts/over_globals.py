"""A classifier of rows whose train and test functions use the script's global variables, with the usual main guard."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import nano_loop
from nano_loop import nano
from scripts.data import BATCH

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=BATCH)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--log-interval", type=int, default=2)
args = parser.parse_args([])

torch.manual_seed(3)
x = torch.rand(96, 6)
y = x @ torch.arange(6.0)
labels = (y > y.median()).long()
trainloader = DataLoader(TensorDataset(x[:64], labels[:64]), batch_size=args.batch_size)
testloader = DataLoader(TensorDataset(x[64:], labels[64:]), batch_size=32)
net = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 2))
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.5)
best_acc, log = 0.0, []


@nano
def train(epoch):
    net.train()
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        optimizer.zero_grad()
        loss = criterion(net(inputs), targets)
        loss.backward()
        optimizer.step()
        if (batch_idx + 1) % args.log_interval == 0 and nano_loop.is_global_zero():
            print(f"Epoch {epoch} [{batch_idx + 1}/{len(trainloader)}] {loss.item():.4f}")
    scheduler.step()
    log.append((epoch, scheduler.get_last_lr()[0], float(nano_loop.all_reduce(loss.item()))))


def test(epoch):
    global best_acc
    net.eval()
    correct = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            correct += net(inputs).argmax(1).eq(targets).sum().item()
    acc = correct / len(testloader.dataset)
    if acc > best_acc and nano_loop.is_global_zero():
        torch.save({"net": net.state_dict(), "acc": acc, "epoch": epoch}, checkpoint)
        best_acc = acc


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "ckpt.pth"
        for epoch in range(args.epochs):
            train(epoch)
            test(epoch)
        RESULT = {"log": log, "best": best_acc, "checkpoint": torch.load(checkpoint), "net": net.state_dict()}
