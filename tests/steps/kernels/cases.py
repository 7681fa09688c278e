"""Models that call the kernels of one step, each with a training loop and the expected results."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop import nano
from nano_loop.kernels import activations, override
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.linear import linear, product
from nano_loop.kernels.norm import norms
from nano_loop.kernels.rnn import rnn
from nano_loop.patching.operators import gives_kernels
from nano_loop.steps import models
from nano_loop.steps.kernel_table import KERNEL_STEPS

BY_NAME = {kind.name: kind for kind in KERNEL_STEPS}
#: Makes sizes of any kind large enough, and the functions in C the default choice.
THRESHOLDS = {
    BY_NAME["fast_activation"]: [(activations, "MIN_ELEMENTS", 1)],
    BY_NAME["fast_cross_entropy"]: [],
    BY_NAME["fast_linear"]: [
        *((linear, "MIN_MULTIPLICATIONS", 1), (models, "LARGE", 1)),
        (product.KERNEL, "is_first_guess", True),
    ],
    BY_NAME["fast_norm"]: [(norms, "MIN_ELEMENTS", 1)],
    BY_NAME["fast_rnn"]: [(rnn, "MIN_MULTIPLICATIONS", 1), (product.KERNEL, "is_first_guess", True)],
}


def use_for_all_sizes(monkeypatch, kind):
    """Make a step compute tensors of any size, or skip the test if it cannot."""
    if kind.row.kernels.calls_torchs_kernels and not gives_kernels():
        pytest.skip("it needs torch 2.9")
    for kernel in (
        kind.row.kernels.kernel,
        *(place for place, *_ in THRESHOLDS[kind] if isinstance(place, CompiledKernel)),
    ):
        if kernel.unavailable is not None:
            pytest.skip(kernel.unavailable)
    for place, name, value in THRESHOLDS[kind]:
        monkeypatch.setattr(place, name, value)


@dataclass(frozen=True)
class Case:
    """A model, its training loop, and the comparison with the loop that uses torch's kernels.

    `bounds` has the largest difference for losses, gradients and state: relative to the norm, or per element.
    `reference` has the options of the loop with torch's kernels, in addition to those of the run.
    """

    kind: type
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    is_expected: Callable[[list[str]], bool]  # whether the loop called the right C functions
    bounds: dict[str, Any]
    steps: int = 3
    lr: float = 0.1
    variants: tuple[dict[str, Any], ...] = ({},)  # additional options to test
    reference: dict[str, Any] = field(default_factory=dict)

    def built(self):
        torch.manual_seed(0)
        return self.make()


def loop(model, optimizer, case):
    """Train, and return the losses, the gradients of all steps, and the final state."""
    losses, gradients = [], []
    for number in range(case.steps):
        optimizer.zero_grad()
        loss = case.loss(model, number)
        assert loss.dtype is torch.float32
        loss.backward()
        losses.append(loss.detach())
        gradients += [each.grad.clone() for each in model.parameters()]
        optimizer.step()
    return {"losses": losses, "gradients": gradients, "state": [each.clone() for each in model.state_dict().values()]}


def trained(case, loop=loop, **options):
    """Return the result of a loop in a run, and the report."""
    train, model = (
        nano(**{"precision": "bf16", "verbose": False, "tune_operators": False, **options})(loop),
        case.built(),
    )
    return train(model, torch.optim.SGD(model.parameters(), case.lr), case), train.report


def assert_near(found, expected, bounds):
    for what, bound in bounds.items():
        for mine, other in zip(found[what], expected[what], strict=True):
            if isinstance(bound, dict):
                torch.testing.assert_close(mine, other, **bound)
            else:
                assert (mine - other).float().norm() <= bound * other.float().norm()


def exactly(*functions, steps=3):
    """Whether each step calls exactly these functions."""
    return lambda called: called == [*functions] * steps


def normal(*sizes, seed=1):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


class Checkpointed(nn.Module):
    """A module that is recomputed in the backward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


# --- activations ---


def with_activation(kind, *functions):
    def loss(model, number):
        x = normal(32, 16, seed=number)
        return (model(x).float() - x[:, :8]).square().mean()

    return Case(
        BY_NAME["fast_activation"],
        lambda: nn.Sequential(nn.Linear(16, 64), kind(), nn.Linear(64, 8)),
        loss,
        exactly(*functions, steps=6),
        {"losses": {"rtol": 0.01, "atol": 0.001}},
        steps=6,
        lr=0.3,
        reference={"precision": 32, "exact": True},
    )


ACTIVATIONS = {
    "GELU by tanh": with_activation(lambda: nn.GELU("tanh"), "gelu_forward", "gelu_backward"),
    "tanh": with_activation(nn.Tanh, "tanh_forward"),
}


# --- norms ---

CHANNELS, SIDE = 16, 12
BATCH = ("batch_norm", "batch_norm_backward")
GROUP, LAYER = ("group_norm", "group_norm_backward"), ("layer_norm", "layer_norm_backward")


class Images(nn.Module):
    """Classifies images; the features go through a norm."""

    def __init__(self, norm):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, CHANNELS, 3, padding=1), norm
        self.head = nn.Linear(CHANNELS, 4)

    def forward(self, x):
        return self.head(self.norm(self.convolution(x)).relu().mean((2, 3)))


class Rows(Images):
    """The same, with a norm over each pixel's channels."""

    def forward(self, x):
        return self.head(self.norm(self.convolution(x).permute(0, 2, 3, 1)).relu().mean((1, 2)))


def images():
    return normal(4, 3, SIDE, SIDE), torch.tensor([0, 3, 1, 2])


def loss_of_images(model, number):
    x, y = images()
    return F.cross_entropy(model(x), y)


def with_norm(make, *functions, **named):
    close = {"rtol": 5e-3, "atol": 2e-3}
    variants, bounds = ({}, {"channels_last": True}), {"losses": close, "state": close}
    return Case(BY_NAME["fast_norm"], make, loss_of_images, exactly(*functions), bounds, variants=variants, **named)


NORMS = {
    "batch norm": with_norm(lambda: Images(nn.BatchNorm2d(CHANNELS)), *BATCH),
    "group norm": with_norm(lambda: Images(nn.GroupNorm(4, CHANNELS)), *GROUP),
    # torch sums the gradients of a layer norm's weights in bf16, and ours are summed in fp32.
    "layer norm": with_norm(lambda: Rows(nn.LayerNorm(CHANNELS)), *LAYER, reference={"fp32_ops": ["layer_norm"]}),
    "checkpointed norm": with_norm(lambda: Images(Checkpointed(nn.GroupNorm(4, CHANNELS))), "group_norm", *GROUP),
}


# --- linear layers ---

WIDTH, ROWS, OUTPUTS = 64, 96, 40


def two_layers():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, OUTPUTS, bias=False))


def with_layers(make, layers=2):
    def loss(model, number):
        x = normal(ROWS, WIDTH, seed=number)
        return F.mse_loss(model(x).float(), x[:, :OUTPUTS])

    def is_expected(called):  # per step: the forward and two gradients, except the input's gradient in the first layer
        return called.count("product") >= 3 * (3 * layers - 1)

    return Case(
        BY_NAME["fast_linear"], make, loss, is_expected, {"gradients": 0.01}, variants=({}, {"precision": "bf16-true"})
    )


LINEARS = {
    "linear": with_layers(two_layers),
    "checkpointed layers": with_layers(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(two_layers())), 3),
}


# --- LSTMs ---

SIZE, STEPS, SEQUENCES = 24, 10, 12


class Sequences(nn.Module):
    """An LSTM, followed by a layer for its last output."""

    def __init__(self, recomputes=False, **options):
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.lstm = nn.LSTM(SIZE, 32, batch_first=True, **options)
        self.inner = Checkpointed(self.lstm) if recomputes else self.lstm
        self.last = nn.Linear(32 * (2 if self.lstm.bidirectional else 1), 1)

    def forward(self, x):
        return self.last(self.inner(self.first(x))[0][:, -1])


def with_lstm(forwards=1, **options):
    def loss(model, number):
        x = normal(SEQUENCES, STEPS, SIZE)
        return (model(x).float().squeeze(1) - x[:, :, 0].sum(1)).square().mean()

    def is_expected(called):
        return called.count("recurrence_forward") == 3 * forwards

    bounds, variants = {"gradients": 0.02}, ({}, {"precision": "bf16-true"})
    return Case(BY_NAME["fast_rnn"], lambda: Sequences(**options), loss, is_expected, bounds, variants=variants)


LSTMS = {
    "one layer": with_lstm(),
    "two layers in both directions": with_lstm(4, num_layers=2, bidirectional=True),
    "checkpointed LSTM": with_lstm(2, recomputes=True),
}


# --- losses of language models ---

WORDS, EMBEDDED = 5000, 16
IN_BF16, IN_FP32 = ["cross_entropy_bf16", "gradient_bf16_to_bf16"], ["cross_entropy_float", "gradient_float_to_float"]


class Words(nn.Module):
    """Predicts words; `loss` computes the loss from the logits."""

    def __init__(self, loss=None):
        super().__init__()
        self.embedding, self.head, self.loss = nn.Embedding(WORDS, EMBEDDED), nn.Linear(EMBEDDED, WORDS), loss

    def forward(self, words, targets):
        logits = self.head(self.embedding(words))
        return logits if self.loss is None else self.loss(logits, targets)


def of_cast(logits, targets):
    """As Hugging Face's models do."""
    return F.cross_entropy(logits.float().view(-1, WORDS), targets.view(-1))


def of_bf16(logits, targets):
    """As nanoGPT does."""
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1), ignore_index=7)


def of_two(logits, targets):
    """Two losses that share one cast."""
    logits = logits.float().view(-1, WORDS)
    return F.cross_entropy(logits, targets.view(-1)) + F.cross_entropy(logits, targets.view(-1).flip(0))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(WORDS, (2, 4, 16), generator=generator)


def of_words(loss, functions=IN_FP32, is_outside=False, bound=1e-6):
    """A case with a loss in the model, or outside it."""

    def computed(model, number):
        words, targets = data()
        return loss(model(words, targets), targets) if is_outside else model(words, targets)

    return Case(
        BY_NAME["fast_cross_entropy"],
        lambda: Words(None if is_outside else loss),
        computed,
        exactly(*functions, steps=2),
        {"losses": bound, "state": bound},
        steps=2,
        lr=1.0,
    )


# Both use bf16 logits, and fp32 sums in a different order. If two losses share the cast, bf16 rounding applies to the
# sum of their gradients, or to each one. `tests/kernels/test_head.py` covers more ways to write the loss.
LOSSES = {
    "of_bf16": of_words(of_bf16, IN_BF16),
    "of_cast": of_words(of_cast),
    "of_two": of_words(of_two, [*IN_FP32, *IN_FP32], bound=2**-11),
    "outside": of_words(of_bf16, is_outside=True),
}


def compute_in_c(patch):
    """Use functions in C for fp32 tensors of a run, whether or not they were measured to be faster."""
    choose = override.Override._is_chosen
    always = lambda self, algorithm, *call: algorithm.kernel is not None or choose(self, algorithm, *call)  # noqa: E731
    patch.setattr(override.Override, "_is_chosen", always)
