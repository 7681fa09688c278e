"""Classify scikit-learn's breast cancer data on several hosts, with processes started by torchrun, srun or mpirun.

    python examples/multi_node.py                                   # one process
    torchrun --nproc-per-node 2 examples/multi_node.py              # two processes on this host
    torchrun --nnodes 2 --node-rank 0 ... examples/multi_node.py    # several hosts: see multi_node.md

nano_loop detects the launcher, so nothing in this file names hosts or ranks. It needs
`pip install ".[examples]"` in the checkout. The data comes with scikit-learn, so nothing is downloaded.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nano_loop import TorchNano

parser = argparse.ArgumentParser(description="Train a small classifier on one host or on several.")
parser.add_argument("--num-processes", type=int, metavar="N", help="processes on this host, without a launcher")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=32, help="rows per step, of all processes (default: 32)")
parser.add_argument("--save", type=Path, metavar="FILE", help="save the trained weights to FILE")
args = parser.parse_args()


def tables():
    """Return the rows for training and for testing, scaled with the statistics of the training rows."""
    rows, labels = load_breast_cancer(return_X_y=True)
    split = train_test_split(rows, labels, test_size=0.2, random_state=0)
    scaler = StandardScaler().fit(split[0])
    train_x, test_x = (torch.tensor(scaler.transform(x), dtype=torch.float32) for x in split[:2])
    train_y, test_y = (torch.tensor(y, dtype=torch.float32)[:, None] for y in split[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


class Trainer(TorchNano):
    def train(self, train_set, test_set):
        """Train, and return the accuracy on the test set."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        # All processes together use the same batches as one.
        loader = DataLoader(train_set, args.batch_size // self.world_size, shuffle=True)
        test_loader = DataLoader(test_set, 64)
        model, optimizer, (loader, test_loader) = self.setup(model, optimizer, loader, test_loader)

        for _ in range(args.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.binary_cross_entropy_with_logits(model(x), y).backward()
                optimizer.step()

        model.eval()
        with torch.no_grad():  # every process sees the whole test set
            correct = sum(((model(x) > 0) == (y > 0.5)).sum().item() for x, y in test_loader)
        if args.save and self.is_global_zero:
            torch.save(model.state_dict(), args.save)
        return correct / len(test_set)


trainer = Trainer(args.num_processes, auto_lr=False)
accuracy = trainer.train(*tables())
if trainer.is_global_zero:  # under torchrun, every process runs this line
    print(f"{trainer.world_size} processes: test accuracy {accuracy:.2%}")
