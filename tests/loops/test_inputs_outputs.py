"""All inputs and outputs of a model: lists, dicts, dataclasses, named tuples, packed sequences."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from .pairs import FP64, ROUNDED, pair, untouched
from .tasks import ADAMW, images, job, steps, vectors


@dataclass
class Output:
    logits: torch.Tensor
    hidden: list
    loss: torch.Tensor | None = None
    note: str = "a dataclass"


class Pair(NamedTuple):
    mean: torch.Tensor
    width: torch.Tensor


class Fields(OrderedDict):
    """A dict with attributes, like transformers' outputs."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Everything(nn.Module):
    """Returns an output of the kind that its caller requests."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, batch, *, labels=None, kind="dataclass", **unused):
        hidden = self.body(batch["x"]).relu()
        logits = self.head(hidden)
        if kind == "dataclass":
            loss = None if labels is None else cross_entropy(logits, labels)
            return Output(logits, [hidden, {"mean": hidden.mean(1)}], loss)
        if kind == "named tuple":
            return Pair(logits, hidden.std(1))
        if kind == "dict":
            return Fields(logits=logits, hidden=(hidden, None, 3), counts=batch["count"])
        return [logits, (hidden, [batch["count"], "text"])]


def dicts():
    x = torch.randn(20, 6)
    items = [{"x": row, "y": row[:3].argmax(), "count": torch.tensor(i)} for i, row in enumerate(x)]
    return DataLoader(items, batch_size=5, shuffle=True)


@pair(job(model=Everything, optimizer=ADAMW, loader=dicts))
def test_nested_outputs_keep_their_types(model, optimizer, loader, by_hand=untouched):
    outputs = []
    for batch in steps(loader, optimizer):
        out = by_hand(model)(batch, labels=batch["y"], extra=None)
        fields = by_hand(model)(batch, kind="dict")
        means = by_hand(model)(batch=batch, kind="named tuple")
        (out.loss + cross_entropy(fields.logits, batch["y"]) + means.width.mean()).backward()
        outputs += [out, fields, means, by_hand(model)(batch, kind="list")]
    return outputs


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True, num_layers=2)
        self.head = nn.Linear(8, 3)

    def forward(self, packed, state=None):
        out, state = self.lstm(packed, state)
        return out, state, self.head(state[0][-1])


def sequences():
    return DataLoader([(torch.randn(5, 4), 1 + i % 5, i % 3) for i in range(12)], batch_size=6)


@pair(job(model=Recurrent, optimizer=ADAMW, loader=sequences), without=ROUNDED, trains_lstms=True)
def test_packed_sequences_through_an_lstm(model, optimizer, loader, by_hand=untouched):
    outputs = []
    for x, lengths, y in steps(loader, optimizer):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, state, logits = by_hand(model)(packed)
        padded, sizes = pad_packed_sequence(out, batch_first=True)
        cross_entropy(logits, y).backward()
        outputs += [padded, sizes, state, logits, by_hand(model.lstm)(x)]
    return outputs


@pair(job(model=Recurrent, optimizer=ADAMW, loader=sequences), trains_lstms=True, kernels_in_bf16=True)
def test_a_hidden_state_carried_from_call_to_call(model, optimizer, loader, by_hand=untouched):
    """Truncated backpropagation through time: the detached output is the next input."""
    state, losses = None, []
    for x, _, y in steps(loader, optimizer):
        _, state, logits = by_hand(model)(x, state)
        cross_entropy(logits, y).backward()
        state = tuple(t.detach() for t in state)
        losses.append(logits)
    return losses, state


class TwoImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.volume = nn.Conv3d(1, 2, 3)

    def forward(self, pictures, also, weight=None):
        first, second = (self.conv(p) for p in pictures)
        deep = self.volume(also["volume"])
        total = first.mean((2, 3)) + second.mean((2, 3)) + deep.mean((2, 3, 4)).repeat(1, 2)
        return {"logits": total[:, :3] if weight is None else total[:, :3] * weight, "maps": (first, deep)}


@pair(job(model=TwoImages, optimizer=ADAMW, loader=images), repeats_weights=True, kernels_in_bf16=True)
def test_nested_inputs(model, optimizer, loader, by_hand=untouched):
    outputs = []
    for x, y in steps(loader, optimizer):
        given = [x, x.flip(0)]
        out = by_hand(model)(given, {"volume": x.unsqueeze(1)}, weight=torch.tensor(2.0))
        cross_entropy(out["logits"], y).backward()
        assert given[0] is x
        assert x.is_contiguous()
        outputs.append(out)
    return outputs


class Scores(nn.Module):
    """Returns values other than float tensors: indices, booleans, a float, nothing; one tensor twice; its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        scores = self.layer(x)
        return scores, scores, scores.argmax(1), scores > 0, float(len(x)), None, x, scores.detach().double()


@pair(job(model=Scores), without=[FP64])
def test_outputs_that_are_not_floats(model, optimizer, loader, by_hand=untouched):
    outputs = []
    for x, y in steps(loader, optimizer):
        out = by_hand(model)(x)
        assert out[6] is x
        cross_entropy(out[0], y).backward()
        outputs.append(out)
    return outputs


class NoOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.kept = None

    def forward(self, *xs):
        self.kept = [self.layer(x) for x in xs]


@pair(job(model=NoOutput))
def test_outputs_kept_on_the_model(model, optimizer, loader, by_hand=untouched):
    """A value that a model keeps for its caller is not an output of the call: it stays as autocast made it."""
    outputs = []
    for x, y in steps(loader, optimizer):
        assert by_hand(model)(x, 2 * x) is None
        cross_entropy(model.kept[0].float(), y).backward()
        outputs.append([t.detach() for t in model.kept])
    model.kept = None
    return outputs


@pair(job(loader=lambda: vectors(shuffle=False, drop_last=True)))
def test_outputs_edited_in_place(model, optimizer, loader, by_hand=untouched):
    outputs = []
    for x, y in steps(loader, optimizer):
        out = by_hand(model)(x)
        out += 1
        out[:, 0] = 0
        cross_entropy(out, y).backward()
        outputs.append((out, out.is_leaf, out.is_contiguous()))
    return outputs
