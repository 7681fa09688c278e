"""A recurrent language model whose batches are cut manually from one text, with the state detached between them."""

import math

import torch
from torch import nn

from nano_loop import nano
from scripts.data import BATCH, text

UNDIVIDED = True
BPTT, CLIP = 5, 0.25


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid):
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(ntoken, ninp), nn.LSTM(ninp, nhid, 2)
        self.decoder = nn.Linear(nhid, ntoken, bias=False)
        self.decoder.weight = self.encoder.weight  # tied
        self.nhid = nhid

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return nn.functional.log_softmax(self.decoder(output).flatten(0, 1), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(2, bsz, self.nhid), weight.new_zeros(2, bsz, self.nhid)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def get_batch(source, i):
    seq_len = min(BPTT, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


@nano
def train(model, criterion, train_data, lr):
    model.train()
    total_loss = 0.0
    hidden = model.init_hidden(train_data.size(1))
    for i in range(0, train_data.size(0) - 1, BPTT):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item() * len(data)
    return total_loss / len(train_data)


torch.manual_seed(1111)
model = RNNModel(12, 8, 8)
train_data = batchify(text(), BATCH)
lr, best_loss, losses = 2.0, None, []
for _epoch in range(3):
    loss = train(model, nn.NLLLoss(), train_data, lr)
    losses.append(math.exp(loss))
    if best_loss is None or loss < best_loss:
        best_loss = loss
    else:
        lr /= 4.0
RESULT = {"perplexities": losses, "model": model.state_dict()}
