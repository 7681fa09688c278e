"""A model whose attention nano_loop computes with different kernels than torch."""

from torch import nn


class Attending(nn.Module):
    """Accepts token ids below 20, and returns three values per sequence."""

    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True)
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        return self.last(self.layer(self.embedding(x))[:, 0])
