"""Fused steps for only those rows of a table that have a gradient or a state, bit-identical to torch's full steps.

A step of SGD or Adagrad leaves rows without a gradient unchanged. Adam, and SGD with momentum, leave rows unchanged
whose gradient and moments are zero. This is true without weight decay; with AdamW's, such rows only decay. The rows
with a gradient are known from `nano_loop.kernels.embedding`. Moments are searched once, and again after other code has
written to them. If the size of a table is not a multiple of 16, torch steps the last rows, because it does not use
vector instructions for all of their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nano_loop.kernels.embedding import KERNEL, RowGradient, row_gradient_of
from nano_loop.patching.torch_private import has_lone_storage
from nano_loop.patching.torch_private_optimizers import fused_adagrad, fused_adam, fused_sgd

_UNIT = 16  # numbers that torch's kernels compute together on every CPU
#: The vector instructions with which torch's kernels round as these steps do.
_VECTORS = ("AVX2", "AVX512")
_LEAST, _LARGEST = 1e-30, 1e6  # numbers between these, times zero, are zero in fp32


class RowStep(NamedTuple):
    """A step of one table by torch's names of settings, with its `tensors` for C, and the counter, counted before."""

    rule: Rule
    rows: RowGradient
    tensors: tuple[Tensor, ...]
    counter: Tensor | None
    settings: Mapping[str, Any]

    def __call__(self) -> None:
        """Take the step without recording gradients, and without changing versions."""
        count, width = self.rows.shape
        together = count - count % (_UNIT // math.gcd(_UNIT, width))
        self.rule.by_rows(self, together)
        if together < count:
            counters = [] if self.counter is None else [[self.counter]]
            self.rule.by_torch(*([tensor[together:]] for tensor in self.tensors), *counters, **self.settings)


@dataclass(frozen=True, eq=False)
class Rule:
    """How one of torch's kernels steps rows."""

    by_torch: Callable[..., None]  # calls torch's kernel with lists of tensors and the settings
    #: Takes a step and the number of rows to consider, and updates those that change.
    by_rows: Callable[[RowStep, int], None]
    settings: tuple[str, ...]  # the names of a group's settings
    states: Callable[[Mapping[str, Any]], tuple[str, ...]]  # returns the names of the states for given settings
    has_counter: bool  # whether torch counts steps, and its kernel takes the counters after the states


def row_step(rule: Rule, tensors: Sequence[Tensor], settings: Mapping[str, Any]) -> RowStep | None:
    """Return the step by rows of a table, with gradient, states and counter in `tensors`, or None if torch is to."""
    rows = row_gradient_of(tensors[0])
    if rows is None:
        return None
    tensors, counter = (tensors[:-1], tensors[-1]) if rule.has_counter else (tensors, None)
    is_plain = all(_is_plain(tensor) and tensor.shape == rows.shape for tensor in tensors)
    # If a storage contains several states, torch copies all of it when one of them begins to be watched.
    gradient = rows.raw(tensors[1]) if is_plain and all(map(has_lone_storage, tensors[2:])) else None
    if gradient is not None and _keeps_others(settings) and rounds_as_torch():
        return RowStep(rule, rows, (tensors[0], gradient, *rows.marked(tensors[2:])), counter, settings)
    rows.forget_states()
    return None


def _is_plain(tensor: Tensor) -> bool:
    # `memory.is_plain` reads the address, which ends the sharing by which writes are detected.
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def _adam_by_rows(step: RowStep, count: int) -> None:
    assert step.counter is not None
    settings, number = step.settings, step.counter.item()
    lr, (beta1, beta2) = settings["lr"], settings["betas"]
    decay = 1 - lr * settings["weight_decay"] if settings["decoupled_weight_decay"] else 1.0
    numbers = (decay, 1 - beta1, 1 - beta2, beta2, math.sqrt(1 - beta2**number), settings["eps"])
    size = -(lr / (1 - beta1**number))
    sizes = (count, step.rows.shape[1])
    KERNEL("adam_rows", *step.tensors, step.rows.marks, *sizes, sign(settings), *map(float, numbers), size)


def _sgd_by_rows(step: RowStep, count: int) -> None:
    settings, width = step.settings, step.rows.shape[1]
    if settings["momentum"]:
        numbers = (sign(settings), settings["momentum"], 1 - settings["dampening"], -settings["lr"])
        is_nesterov = int(settings["nesterov"])
        KERNEL("momentum_rows", *step.tensors, step.rows.marks, count, width, is_nesterov, *map(float, numbers))
    else:
        call = (*step.rows.listed, count, width, sign(settings), -float(settings["lr"]))
        KERNEL("sgd_rows", *step.tensors, *call)


def _adagrad_by_rows(step: RowStep, count: int) -> None:
    assert step.counter is not None
    settings = step.settings
    rate = settings["lr"] / (1 + (step.counter.item() - 1) * settings["lr_decay"])
    call = (*step.rows.listed, count, step.rows.shape[1], sign(settings), float(rate), float(settings["eps"]))
    KERNEL("adagrad_rows", *step.tensors, *call)


def sign(settings: Mapping[str, Any]) -> float:
    """Return the factor of the gradients in a step."""
    return -1.0 if settings["maximize"] else 1.0


def rounds_as_torch() -> bool:
    """Whether steps of rows are bit-identical to torch's on this CPU. Elsewhere, as on ARM, torch steps all rows."""
    return torch.backends.cpu.get_cpu_capability() in _VECTORS


def _keeps_others(settings: Mapping[str, Any]) -> bool:
    """Whether rows without a gradient and a state stay unchanged, or only decay."""
    is_kept = not settings["weight_decay"] or settings.get("decoupled_weight_decay", False)
    return bool(is_kept and abs(settings["lr"]) < _LARGEST and settings.get("eps", 1) > _LEAST)


ADAM = Rule(
    fused_adam,
    _adam_by_rows,
    ("lr", "weight_decay", "eps", "maximize", "betas", "decoupled_weight_decay"),
    lambda settings: ("exp_avg", "exp_avg_sq"),
    True,
)
SGD = Rule(
    fused_sgd,
    _sgd_by_rows,
    ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize"),
    lambda settings: ("momentum_buffer",) if settings["momentum"] else (),
    False,
)
ADAGRAD = Rule(
    fused_adagrad,
    _adagrad_by_rows,
    ("lr", "lr_decay", "weight_decay", "eps", "maximize"),
    lambda settings: ("sum",),
    True,
)
