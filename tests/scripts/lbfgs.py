"""Sines that two LSTM cells continue, trained on all of the data by LBFGS with a closure."""

import torch
from torch import nn

from nano_loop import nano
from scripts.data import waves

UNDIVIDED = True


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8), nn.Linear(8, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t = c_t = h_t2 = c_t2 = torch.zeros(input.size(0), 8)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


@nano
def train(seq, optimizer, criterion, input, target, steps):
    losses = []
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(input), target)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


torch.manual_seed(0)
data = waves()
seq = Sequence()
optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.5, max_iter=4)
losses = train(seq, optimizer, nn.MSELoss(), data[:, :-1], data[:, 1:], 3)
with torch.no_grad():
    RESULT = {"losses": losses, "future": seq(data[:3, :-1], future=5)}
