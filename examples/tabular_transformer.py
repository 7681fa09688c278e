"""Diagnose breast tumours from a table of 30 measurements with a transformer: one line of set-up in `TorchNano.train`.

    python examples/tabular_transformer.py                     # accelerated
    python examples/tabular_transformer.py --plain             # the same loop without nano_loop
    python examples/tabular_transformer.py --precision 32 --epochs 5

Each value becomes a token, and attention layers combine the tokens (Gorishniy et al., 2021). It needs
`pip install ".[examples]"` in the checkout. The data comes with scikit-learn, so nothing is downloaded.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import QuantileTransformer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="Classify rows of a table with a transformer.")
parser.add_argument("--plain", action="store_true", help="run the same loop without nano_loop")
parser.add_argument("--precision", default="auto", help="32, bf16 or auto (default: auto)")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--width", type=int, default=128, help="of a token (default: 128)")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
args = parser.parse_args()

precision = 32 if args.precision == "32" else args.precision


class TableTransformer(nn.Module):
    """Map rows of values (N, columns) to the logits of the classes."""

    def __init__(self, columns, classes, width, layers=3):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(columns, width) / width**0.5)
        self.shift = nn.Parameter(torch.zeros(columns + 1, width))  # columns, and the token to classify
        layer = nn.TransformerEncoderLayer(width, 8, 2 * width, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, rows):
        numbers = F.pad(rows[:, :, None] * self.scale, (0, 0, 0, 1)) + self.shift
        return self.head(self.layers(numbers)[:, -1])


def tumours():
    """Return the tumours as a training and a test dataset, with normally distributed columns."""
    rows, labels = load_breast_cancer(return_X_y=True)
    train_rows, test_rows, train_labels, test_labels = train_test_split(rows, labels, test_size=0.25, random_state=0)
    normal = QuantileTransformer(n_quantiles=100, output_distribution="normal").fit(train_rows)
    for rows, labels in ((train_rows, train_labels), (test_rows, test_labels)):
        yield TensorDataset(torch.tensor(normal.transform(rows), dtype=torch.float32), torch.tensor(labels))


@torch.no_grad()
def accuracy(model, loader):
    """Return the fraction of rows that the model labels correctly."""
    model.eval()
    correct = sum((model(rows).argmax(dim=1) == labels).sum().item() for rows, labels in loader)
    model.train()
    return correct / len(loader.dataset)


if args.plain:

    class TorchNano:
        """Replace `TorchNano` for `--plain`: leave the objects unchanged."""

        def __init__(self, **options):
            pass

        def setup(self, *objects):
            """Return the objects unchanged."""
else:
    from nano_loop import TorchNano


class Training(TorchNano):
    """The training loop, moved from a function into a method."""

    def train(self, train_set, test_set):
        """Train a model, and return its accuracy on the test set."""
        model = TableTransformer(train_set.tensors[0].shape[1], 2, args.width)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-4, weight_decay=1e-2)
        train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
        test_loader = DataLoader(test_set, args.batch_size)
        self.setup(model, optimizer, train_loader, test_loader)  # sets them up in place
        for epoch in range(args.epochs):
            for rows, labels in train_loader:
                loss = F.cross_entropy(model(rows), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
        return accuracy(model, test_loader)


torch.manual_seed(args.seed)
train_set, test_set = tumours()
start = time.perf_counter()
test_accuracy = Training(precision=precision).train(train_set, test_set)
seconds = time.perf_counter() - start

print(f"test accuracy {test_accuracy:.2%} after {seconds:.1f} s of training")
if args.json:
    args.json.write_text(json.dumps({"seconds": seconds, "accuracy": test_accuracy}))
