"""`verify` finds planted faults, names their layer, reports no correct model, and changes nothing."""

import copy
import json
import random
import re
import threading
from contextlib import contextmanager

import numpy
import pytest
import torch
from attending import Attending
from torch import nn
from torch.nn import functional as F

from nano_loop import NanoConfigError, verify
from nano_loop.kernels.attention import attention, blocked_attention
from nano_loop.kernels.convolution import convolution, gradient_plans
from nano_loop.patching.operators import gives_kernels
from nano_loop.precision.verification.verification import compare, verified
from nano_loop.runtime.run import accelerated_copy
from nano_loop.runtime.settings import Settings


def mlp(generator, depth=2, width=48, norm=nn.LayerNorm, activation=nn.GELU):
    layers = [nn.Linear(12, width)]
    for _ in range(depth):
        layers += [norm(width), activation(), nn.Dropout(0.2), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Linear(width, 3)), torch.randn(64, 12, generator=generator)


def convolutional(generator, width=16, inplace=True):
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace)]
    layers += [nn.Conv2d(width, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3))
    return model, torch.randn(16, 3, 16, 16, generator=generator)


def attending(generator, width=32):
    return Attending(width), torch.randint(0, 20, (16, 12), generator=generator)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.last = kind(8, 24, batch_first=True), nn.Linear(24, 3)

    def forward(self, x):
        return self.last(self.rnn(x)[0][:, -1])


def recurrent(generator, kind=nn.LSTM):
    return Recurrent(kind), torch.randn(16, 10, 8, generator=generator)


KINDS = [
    *((mlp, {"depth": depth, "norm": norm}) for depth in (1, 3) for norm in (nn.LayerNorm, nn.BatchNorm1d)),
    *((mlp, {"activation": activation, "width": 96}) for activation in (nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid)),
    *((convolutional, {"width": width, "inplace": inplace}) for width in (8, 32) for inplace in (True, False)),
    *((attending, {"width": width}) for width in (16, 32, 64)),
    *((recurrent, {"kind": kind}) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
    *((mlp, {"depth": depth, "width": 16}) for depth in (0, 6)),
]


def built(generator, layers, shape, width=0):
    """Return layers with a head, and an input of `shape`, which has indices below `width` if `width` is given."""
    x = torch.randint(0, width, shape, generator=generator) if width else torch.randn(*shape, generator=generator)
    model = nn.Sequential(*layers(), nn.Flatten())
    model.eval()
    features = model(x).shape[1]
    return model.train().append(nn.Linear(features, 3)), x


class Residual(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x):
        return x + self.inner(x)


class Viewed(nn.Module):
    """Flattens with a view, which is invalid for NHWC images."""

    def forward(self, x):
        return x.view(len(x), -1)


class First(nn.Module):
    """Returns the first output of a module that has several."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def block(width, stride=1, norm=nn.BatchNorm2d, **arguments):
    return nn.Conv2d(width, width, 3, stride, padding=1, **arguments), norm(width), nn.ReLU()


IMAGES, SEQUENCES, TOKENS = (8, 3, 12, 12), (8, 10, 16), (8, 10)
BUILT = {
    "conv without a norm": (lambda: [nn.Conv2d(3, 16, 3), nn.ReLU()], IMAGES),
    "conv with a bias before its norm": (lambda: [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()], IMAGES),
    "conv without a bias": (lambda: [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.SiLU()], IMAGES),
    "resnet": (lambda: [nn.Conv2d(3, 16, 3), *(Residual(*block(16), *block(16)) for _ in range(2))], IMAGES),
    "depthwise": (lambda: [nn.Conv2d(3, 16, 1), *block(16, groups=16), nn.Conv2d(16, 8, 1)], IMAGES),
    "group norm": (lambda: [nn.Conv2d(3, 16, 3), *block(16, norm=lambda width: nn.GroupNorm(4, width))], IMAGES),
    "instance norm": (lambda: [nn.Conv2d(3, 16, 3), *block(16, norm=nn.InstanceNorm2d)], IMAGES),
    "strides and pools": (lambda: [nn.Conv2d(3, 16, 3), *block(16, 2), nn.MaxPool2d(2), nn.AvgPool2d(2)], IMAGES),
    "transposed": (lambda: [nn.ConvTranspose2d(3, 8, 2, 2), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(4)], IMAGES),
    "dilated": (lambda: [nn.Conv2d(3, 16, 3, dilation=2), nn.BatchNorm2d(16), nn.Hardswish()], IMAGES),
    "view": (lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), Viewed()], IMAGES),
    "upsampling": (lambda: [nn.Conv2d(3, 8, 3, 2), nn.Upsample(scale_factor=2), *block(8), nn.AvgPool2d(2)], IMAGES),
    "volumes": (lambda: [nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2)], (4, 3, 8, 8, 8)),
    "signals": (lambda: [nn.Conv1d(10, 16, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 8, 3)], SEQUENCES),
    "two LSTMs": (lambda: [First(nn.LSTM(16, 24, 2, batch_first=True))], SEQUENCES),
    "LSTM both ways": (lambda: [First(nn.LSTM(16, 12, bidirectional=True, batch_first=True))], SEQUENCES),
    "GRU both ways": (lambda: [First(nn.GRU(16, 12, bidirectional=True, batch_first=True))], SEQUENCES),
    "embedding and LSTM": (lambda: [nn.Embedding(30, 16), First(nn.LSTM(16, 16, batch_first=True))], TOKENS, 30),
    "embeddings in bags": (lambda: [nn.EmbeddingBag(30, 16), nn.BatchNorm1d(16), nn.ReLU()], TOKENS, 30),
    "transformer": (
        lambda: [nn.Embedding(30, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)],
        TOKENS,
        30,
    ),
    "transformer with norms first": (
        lambda: [nn.TransformerEncoderLayer(16, 4, 32, norm_first=True, activation="gelu", batch_first=True)],
        SEQUENCES,
    ),
    "RMS norm": (lambda: [nn.Linear(16, 32), nn.RMSNorm(32), nn.SiLU(), nn.Linear(32, 16)], SEQUENCES),
}
KINDS += [(built, dict(zip(("layers", "shape", "width"), arguments, strict=False))) for arguments in BUILT.values()]


MAIN = (("bf16", False), (32, True))
OTHERS = (("bf16-true", False), (64, False), (16, False), (16, True), ("bf16-products", True))


def made(kind, arguments, seed):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, x = kind(generator, **arguments)
    return model, (x, torch.randint(0, 3, (len(x),), generator=generator))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("precision", "channels_last", "kinds"),
    [
        *((*each, KINDS[::6]) for each in MAIN),
        *(pytest.param(*each, KINDS, marks=pytest.mark.slow) for each in (*MAIN, *OTHERS)),
    ],
    ids=lambda each: f"{len(each)} kinds" if isinstance(each, list) else str(each),
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's, for RMSNorm under autocast
def test_sound_models_are_not_accused(precision, channels_last, kinds):
    accused = {}
    for seed, (kind, arguments) in enumerate(kinds):
        model, batch = made(kind, arguments, seed)
        found = verify(model, loss_of, batch, precision=precision, channels_last=channels_last)
        if not found.ok:
            accused[f"{kind.__name__} {arguments} {model}"] = str(found)
        elif max(row.error for row in found.gradients) > 0.5:  # of a bias before a batch norm, whose gradient is zero
            accused[f"{model}"] = found.summary()
    assert not accused, "\n\n".join(f"{name}\n{text}" for name, text in accused.items())
    assert len(KINDS) >= 40


@pytest.mark.parametrize("precision", ["bf16", 32, *(pytest.param(p, marks=pytest.mark.slow) for p in (16, "auto"))])
def test_weight_that_is_off_by_5_percent_is_found_in_each_precision(precision):
    settings, missed = Settings.read({"precision": precision, "num_processes": 1}), []
    for seed, (kind, arguments) in enumerate(KINDS[::6]):
        model, batch = made(kind, arguments, seed)
        name = next(name for name, weight in model.named_parameters() if weight.dim() > 1)

        @contextmanager
        def acceleration(copied, name=name):
            with accelerated_copy(settings, copied) as run:
                copied.get_parameter(name).data.mul_(1.05)
                yield run

        found = verified(model, loss_of, batch, settings.options.kind, acceleration)
        missed += [f"{name} of {model}\n{found}"] if found.ok else []
    assert not missed, "\n\n".join(missed)


@pytest.fixture
def planted_attention(monkeypatch):
    """Make the scores of nano_loop's attention 10% too large."""
    monkeypatch.setattr(attention, "MIN_SCORES", 1)
    original = blocked_attention.blocked_attention
    monkeypatch.setattr(blocked_attention, "blocked_attention", lambda *args: original(*args) * 1.1)


@pytest.mark.skipif(blocked_attention.KERNEL.unavailable is not None, reason=str(blocked_attention.KERNEL.unavailable))
@pytest.mark.usefixtures("planted_attention")
def test_layer_whose_output_is_off_is_named():
    model, batch = made(attending, {"width": 64}, 0)
    found = verify(model, loss_of, batch, precision="bf16")
    assert found.fault == "the output of layer.self_attn"
    assert not found.ok
    assert found.summary() == "the output of layer.self_attn is off by more than rounding"
    row = next(row for row in found.outputs if row.name == "layer.self_attn")
    assert row.is_fault
    assert row.error == pytest.approx(0.1, abs=0.05)
    assert verify(model, loss_of, batch, precision="bf16", fast_attention=False).ok


@pytest.mark.skipif(not gives_kernels(), reason="fast_convolution needs torch 2.9")
@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_gradient_that_is_off_is_named(monkeypatch, factor):
    original = convolution._partly_in_fp32

    def off(*args):
        inputs, weight, bias = original(*args)
        return inputs, weight * factor, bias

    monkeypatch.setattr(convolution, "_partly_in_fp32", off)
    monkeypatch.setattr(gradient_plans, "_weight_is_faster_in_fp32", lambda given: given.weight.size(1) == 16)
    model, batch = made(convolutional, {}, 0)
    found = verify(model, loss_of, batch, precision="bf16")
    assert found.fault == "the gradient of 3.weight"
    assert all(not row.is_fault for row in found.outputs)
    assert verify(model, loss_of, batch, precision="bf16", fast_convolution=False).ok


@pytest.mark.parametrize("precision", ["bf16", 32, 16, "bf16-true", 64])
def test_nothing_is_changed(precision):
    model, batch = made(convolutional, {}, 0)
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer = torch.optim.Adam(model.parameters())
    batch[0].requires_grad_()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), batch[0]))
    model[0].register_forward_hook(lambda *_: (random.random(), numpy.random.rand(), None)[2])
    state, grad = torch.get_rng_state(), model[0].weight.grad
    others = random.getstate(), str(numpy.random.get_state())
    found = verify(model, loss_of, batch, precision=precision)
    assert str((model.state_dict(), optimizer.state_dict(), batch[0])) == str(before)
    assert torch.equal(torch.get_rng_state(), state)
    assert model[0].weight.grad is grad
    assert batch[0].grad is None
    assert model[3].weight.grad is None
    assert (random.getstate(), str(numpy.random.get_state())) == others
    assert len(model[0]._forward_hooks) == 2
    assert "forward" not in vars(model)
    assert found.ok


def test_findings_are_tables_and_json():
    model, batch = made(mlp, {}, 0)
    found = verify(model, loss_of, batch, precision="bf16")
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()
    assert found.as_dict()["gradients"][0]["name"] == f"{len(model) - 1}.bias"
    assert 1e-4 < max(row.error for row in found.gradients) < 0.2
    assert all(row.cosine > 0.98 for row in found.gradients)
    lines = str(found).splitlines()
    assert lines[0] == found.summary()
    assert lines[1] == f"outputs: the 8 largest errors of {len(model) + 1}"
    assert found.setup.options["precision"] == "bf16-mixed"


def test_models_that_draw_numbers_of_their_own_are_remarked_on():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(12, 3)

        def forward(self, x):
            return self.last(x + torch.randn_like(x))

    _, batch = made(mlp, {}, 0)
    assert "draws random numbers" in verify(Noisy(), loss_of, batch).remark
    assert verify(mlp(torch.Generator())[0], loss_of, batch).remark == ""


class Odd(nn.Module):
    """Has its own loss, creates a tensor, and has an attribute named after dropout that is not a dropout layer."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(12, 3)
        self.drop_threshold = 0.5

    def forward(self, x):
        return torch.sigmoid(self.last(x * (x > self.drop_threshold)) + torch.zeros(3))

    def loss(self, batch):
        return F.binary_cross_entropy(self(batch[0]), F.one_hot(batch[1], 3).to(batch[0].dtype))


@pytest.mark.parametrize("precision", ["bf16", 32, 16])
def test_losses_of_the_model_s_own_are_compared(precision):
    _, batch = made(mlp, {}, 0)
    found = verify(Odd(), lambda model, batch: model.loss(batch), batch, precision=precision)
    assert found.ok, str(found)
    assert [row.name for row in found.outputs] == ["last", "Odd"]


def test_small_losses_are_compared():
    model, batch = made(mlp, {}, 0)
    found = verify(model, lambda model, batch: loss_of(model, batch) * 1e-6, batch, precision=16)
    assert found.ok, str(found)
    assert max(row.error_by_hand for row in found.gradients) < 0.05


ONE = torch.ones(3, dtype=torch.float64)
SOUND, LOST = {"a": ONE, "b": ONE}, {"a": ONE, "b": ONE * torch.nan}
EXACT = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
IN_FP32 = EXACT + 4e-7 * EXACT.roll(1)  # as for a CTC loss, which has sums of 1,000 terms in fp32


@pytest.mark.parametrize(
    ("traces", "rounding", "are_faults"),
    [
        ([{"a": ONE}, SOUND, SOUND, SOUND], 2**-7, [False, True]),
        ([{**SOUND, "b": ONE[:2]}, SOUND, SOUND, SOUND], 2**-7, [False, True]),
        ([LOST, LOST, SOUND, SOUND], 2**-7, [False, True]),
        # A length that is right is none where that by hand is off.
        *(
            ([{"a": EXACT * scale} for scale in (factor, 0.92, 1, 1)], 2**-7, [is_fault])
            for factor, is_fault in ((1, False), (0.92, False), (1.08, True))
        ),
        # A factor as far off as fp32 is none.
        *(
            ([{"a": each} for each in (EXACT * factor, IN_FP32, IN_FP32, EXACT)], 2**-23, [is_fault])
            for factor, is_fault in ((1 + 8e-7, False), (1 + 1e-5, True))
        ),
    ],
    ids=range(8),
)
def test_what_is_missing_or_no_number_or_off_by_more_than_by_hand_is_a_fault(traces, rounding, are_faults):
    assert [row.is_fault for row in compare(traces, rounding)] == are_faults


def test_sparse_gradients_are_compared():
    model = nn.Sequential(nn.Embedding(30, 8, sparse=True), nn.Flatten(), nn.Linear(32, 3))
    found = verify(model, loss_of, (torch.arange(64).view(16, 4) % 30, torch.arange(16) % 3), precision=16)
    assert found.ok, str(found)
    assert "0.weight" in [row.name for row in found.gradients]


def holding_a_lock(model):
    model.held = threading.Lock()
    return model


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda model, batch: verify(loss_of, model, batch), "verify of a function.*Pass the model first"),
        (lambda model, batch: verify(model, lambda *_: 3, batch), "loss_fn returned int.*Write loss_fn"),
        *(
            (lambda model, batch, loss=loss: verify(model, loss, batch), "before it called the model.*Write loss_fn")
            for loss in (F.mse_loss, nn.MSELoss(), lambda outputs: outputs.sum())
        ),
        (lambda model, batch: verify(model, lambda model, batch: model(batch[0]), batch), "one element"),
        (lambda model, batch: verify(model, lambda _, batch: loss_of(model, batch), batch), "no gradient.*a copy"),
        (lambda model, batch: verify(model, loss_of, batch, precison="bf16"), "precison.*Write precision"),
        (lambda model, batch: verify(holding_a_lock(model), loss_of, batch), "Sequential cannot be copied.*deepcopy"),
    ],
)
def test_what_cannot_be_compared_is_told(call, told):
    with pytest.raises(NanoConfigError, match=re.compile(told, re.DOTALL)):
        call(*made(mlp, {}, 0))
