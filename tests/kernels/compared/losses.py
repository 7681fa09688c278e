"""Losses over classes, with their gradients."""

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from kernels.compared.oracle import Row, drawn
from nano_loop.kernels.head.cross_entropy import KERNEL, cross_entropy

REDUCTIONS = ("none", "mean", "sum")


def logits_of(rows, width, dtype=torch.float32, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, width, generator=generator) * scale).to(dtype).requires_grad_()
    return logits, torch.randint(width, (rows,), generator=generator)


def by_torch(logits, target, reduction="mean", **named):
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(wide, target, reduction=reduction, **named)


def ours(logits, target, reduction="mean", **named):
    return cross_entropy(logits, target, None, REDUCTIONS.index(reduction), **named)


def with_gradient(function, logits, *args, **named):
    logits = logits.detach().requires_grad_()
    loss = function(logits, *args, **named)
    (gradient,) = torch.autograd.grad(loss, logits, torch.linspace(0.5, 2, loss.numel()).view_as(loss).to(loss.dtype))
    assert gradient.dtype is logits.dtype
    return [loss.detach(), gradient]


def call_of(rows, width, dtype, scale=3.0, reduction="none", smoothing=0.0, seed=0, ignored=True):
    logits, target = logits_of(rows, width, dtype, scale, seed)
    if ignored:
        target[seed % rows] = -100
        target[0] = width - 1
    return logits.detach(), target, {"reduction": reduction, "label_smoothing": smoothing}


def bound(theirs, truth, call, place):
    # Both round at the end: a gradient once, to its dtype, and a loss in fp32, after a sum and a quotient. This much is
    # allowed if torch happens to be exact.
    digits = 2**-22 if truth.dim() < 2 else 2**-9 if call[0].dtype is torch.bfloat16 else 2**-24
    return 1.2 * theirs + digits * truth.abs().max().item()


CROSS_ENTROPY = Row(
    make=call_of,
    ours=lambda call: with_gradient(ours, *call[:2], **call[2]),
    torchs=lambda call: with_gradient(by_torch, *call[:2], **call[2]),
    bound=bound,
    sizes=drawn(
        rows=(1, 40),
        width=st.one_of(st.integers(1, 70), st.integers(500, 1600)),
        dtype=[torch.float32, torch.bfloat16],
        scale=[0.01, 1.0, 10.0, 80.0],
        reduction=[*REDUCTIONS],
        smoothing=[0.0, 0.1, 1.0],
        seed=(0, 99),
    ),
    large=[{"rows": 33, "width": 5003, "dtype": torch.bfloat16, "ignored": False}],
    threads=(1, 2, 2),
    kernel=KERNEL,
)
