"""The key of a search differs where another loop, another batch or another model would be measured."""

import pytest
import torch

from nano_loop.api.decorator import _Call
from nano_loop.runtime.settings import Settings
from nano_loop.search.key import key_of

SCRIPT = """
import argparse, time
from torch import nn

begun = time.time()
args = argparse.Namespace(rows=8, out="a", shape=(4, 8), seen={"a", "b", "c"})
repeats = 2
noise = [torch.zeros(4, 8)]
shapes = {"noise": (4, 8)}
scales = {"loss": lambda loss: loss * 1}

class Settings:
    width = 8

class Scale:
    def of(self, x, times=1):
        return x * times

scale = Scale()

def loss_of(outputs):
    return outputs.square().mean() * 1.0

class Net(nn.Module):
    def __init__(self, depth=1):
        super().__init__()
        self.layer, self.depth = nn.Linear(8, 8), depth

    def forward(self, x):
        for _ in range(self.depth):
            x = self.layer(x) + 1
        return x

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.zeros(8)

def train(model, optimizer, loader, batches):
    for x in loader:
        for _ in range(repeats):
            x = x[: args.rows] + noise[0] + torch.zeros(shapes["noise"]) + torch.zeros(args.shape)
            scales["loss"](loss_of(model(scale.of(x[:, : Settings.width])))).backward()
            optimizer.step()
    print("seconds", time.time() - begun)

model = Net()
loader = torch.utils.data.DataLoader(Images(), batch_size=4)
batches = [torch.zeros(4, 8)]
"""


def key(change=("", "")):
    """Return the key of the script's loop, with a change of its text."""
    before, after = change
    assert before in SCRIPT
    names = {"__name__": "__main__", "torch": torch}
    exec(compile(SCRIPT.replace(before, after) if before else SCRIPT, "train.py", "exec"), names)
    optimizer = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    settings = Settings.read({})
    task = _Call(settings, names["train"], (names["model"], optimizer, names["loader"], names["batches"]), {})
    return key_of(task, settings, ())


@pytest.mark.parametrize(
    "change",
    [
        ("loss_of(model(scale", "loss_of(model(2 * scale"),
        ("mean() * 1.0", "mean() * 2.0"),
        ("self.layer(x) + 1", "self.layer(x).relu()"),
        ("model = Net()", "model = Net(depth=3)"),
        ("return torch.zeros(8)", "return torch.ones(8)"),
        ("rows=8", "rows=4"),
        ("repeats = 2", "repeats = 3"),
        ("shape=(4, 8)", "shape=(1, 8)"),
        ("noise = [torch.zeros(4, 8)]", "noise = [torch.zeros(1, 8)]"),
        ('{"noise": (4, 8)}', '{"noise": (1, 8)}'),
        ("loss * 1}", "loss * 2}"),
        ("width = 8", "width = 4"),
        ("return x * times", "return x * times + 1"),
        ("times=1", "times=2"),
        ("batch_size=4", "batch_size=8"),
        ("batches = [torch.zeros(4, 8)]", "batches = [torch.zeros(9, 8)]"),
    ],
    ids=lambda change: change[1],
)
def test_other_code_or_other_shapes_are_another_search(change):
    assert key(change) != key()


@pytest.mark.parametrize(
    "change",
    [("", ""), ("def train(", "# A remark.\n\ndef train("), ('out="a"', 'out="b"')],
    ids=["later", "a comment", "a path"],
)
def test_same_loop_is_the_same_search(change):
    assert key(change) == key()
