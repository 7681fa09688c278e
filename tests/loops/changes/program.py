"""The program that the table's rows change: a model that uses every kernel, and its loop."""

from contextlib import ExitStack
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..pairs import untouched

CLASSES, CHANNELS, WORDS, WIDTH, HEADS, LENGTH = 12, 16, 1024, 32, 2, 8
#: The sizes of this model's tensors, which are too small to benefit.
SIDE, SAMPLES, BATCH = 8, 16, 8
#: The change is made before the third step and undone before the fifth.
EPOCHS, CHANGED, UNDONE = 3, 1, 2


class EveryKernel(nn.Module):
    """A classifier of an image and a sentence, with a layer for each kernel."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.batch_norm, self.relu = nn.BatchNorm2d(CHANNELS), nn.ReLU()
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False)
        self.group_norm, self.silu = nn.GroupNorm(4, CHANNELS), nn.SiLU()
        self.embedding, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.1)
        self.rms_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.queries, self.attention = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        )
        self.layer_norm, self.gelu = nn.LayerNorm(WIDTH), nn.GELU()
        self.gru = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.mlp = nn.Sequential(
            *(nn.Linear(3 * SIDE * SIDE, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.LeakyReLU(0.1), nn.Dropout(0.1)),
            *(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        )
        self.head = nn.Linear(CHANNELS + 2 * WIDTH, CLASSES)

    def forward(self, images, words):
        return self.head(torch.cat([self.seen(images), self.read(words), self.mlp(images.flatten(1))], 1))

    def seen(self, images):
        x = self.relu(self.batch_norm(self.convolution(images)))
        x = x + self.silu(self.group_norm(self.depthwise(x)))
        return torch.relu(x).mean((2, 3))

    def read(self, words):
        x = self.dropout(self.embedding(words))
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.queries(self.rms_norm(x)).chunk(3, -1)
        )
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.layer_norm(self.gelu(x))
        return F.dropout(self.lstm(self.gru(x)[0])[0].mean(1), 0.1, self.training)


class Samples(Dataset):
    """Images and sentences in memory, indexed like a user-defined dataset."""

    def __init__(self):
        self.images, self.words = torch.randn(SAMPLES, 3, SIDE, SIDE), torch.randint(WORDS, (SAMPLES, LENGTH))
        self.targets = torch.randint(CLASSES, (SAMPLES,))

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.words[index], self.targets[index]


def built():
    model = EveryKernel()
    of_words = [model.embedding, model.rms_norm, model.queries, model.attention, model.layer_norm]
    of_words += [model.gru, model.lstm]
    of_images = [model.convolution, model.batch_norm, model.depthwise, model.group_norm]
    # With a small eps, gradients close to 0 become steps whose signs are those of rounding errors.
    return {
        "model": model,
        "sgd": torch.optim.SGD(parameters(of_images), lr=0.1, momentum=0.9),
        "adamw": torch.optim.AdamW(parameters(of_words), lr=0.01, eps=1e-2),
        "adagrad": torch.optim.Adagrad(parameters([model.mlp, model.head]), lr=0.01, eps=1e-2),
        "loader": DataLoader(Samples(), BATCH, shuffle=True),
    }


def parameters(modules):
    return [parameter for module in modules for parameter in module.parameters()]


class Program:
    """The loop, as a row of the table sees it.

    Attributes
    ----------
    model, sgd, adamw, adagrad, loader
        The arguments of the loop. A row may assign other objects, which are used from then on.
    call : callable
        The loop's call into the model.
    loss : callable
        The loss of outputs and targets.
    seen : list
        The values to compare, in order.
    undo : contextlib.ExitStack
        Closed before the fifth step.
    """

    def __init__(self, model, sgd, adamw, adagrad, loader, by_hand):
        self.model, self.sgd, self.adamw, self.adagrad, self.loader = model, sgd, adamw, adagrad, loader
        self.by_hand, self.seen, self.undo = by_hand, [], ExitStack()
        self.call = lambda *batch: by_hand(self.model)(*batch)
        self.loss = lambda out, targets: F.cross_entropy(out, targets)

    @property
    def samples(self):
        return self.loader.dataset.images, self.loader.dataset.words

    @property
    def optimizers(self):
        return self.sgd, self.adamw, self.adagrad

    def set(self, owner, **attributes):
        for name, value in attributes.items():
            self.undo.enter_context(mock.patch.object(owner, name, value))

    def within(self, context):
        return self.undo.enter_context(context)

    def train(self):
        for *batch, targets in self.loader:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            out = self.call(*batch)
            loss = self.loss(out, targets)
            loss.backward()
            gradients = self.gradients()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
            self.seen += [type(out), out.detach().clone(), type(loss), loss.item(), norm, gradients]

    def gradients(self):
        """Return copies of the gradients, except for tables', because steps by rows require that nobody reads them."""
        read = [p for name, p in self.model.named_parameters() if "embedding" not in name]
        return [None if p.grad is None else p.grad.clone() for p in read]

    def evaluate(self):
        """Record the outputs for the samples, as in a validation."""
        self.model.eval()
        with torch.no_grad():
            self.seen.append(self.call(*self.samples))
        self.model.train()


def changed_by(change):
    """Return a loop of six steps, with a change before the third that is undone before the fifth.

    An error of the program ends it, and must be the same plain and accelerated.
    """

    def loop(model, sgd, adamw, adagrad, loader, by_hand=untouched):
        program = Program(model, sgd, adamw, adagrad, loader, by_hand)
        with program.undo:
            try:
                for epoch in range(EPOCHS):
                    if epoch == CHANGED:
                        change(program)
                    if epoch == UNDONE:
                        program.undo.close()
                    program.train()
                    program.evaluate()
            except Exception as error:
                program.seen.append((type(error), str(error).partition("\n")[0][:200]))
        return program.seen

    return loop
