"""A training case: a model with its inputs, and the state after training."""

import contextlib
import copy
import random
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

torch.optim.SGD([torch.zeros(1)])  # the first one changes its class permanently
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Program:
    """A training step with SGD and one with AdamW. A subclass trains in another way.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which is trained if it has parameters.
    inputs : tuple
        Arguments of the model. Gradients of tensors that require them are compared.
    named : dict
        Keyword arguments.
    """

    def __init__(self, model, inputs=(), named=None):
        self.model, self.inputs = model, (inputs, named or {})

    def copy(self, in_fp64=False):
        """Return a program with the same initial state, which this one does not change."""
        made = copy.copy(self)
        made.model, made.inputs = copy.deepcopy(self.model), tree_map(_copied, self.inputs)
        if in_fp64:
            made.model, made.inputs = made.model.double(), tree_map(in_fp64_too, made.inputs)
        return made

    def redrawn(self, number):
        """Return a copy with each tensor scaled down by up to 1%, so that roundings differ and ties stay ties."""
        made, generator = self.copy(), torch.Generator().manual_seed(number)
        with torch.no_grad():
            for value in tree_leaves((made.inputs, [*made.model.parameters()])):
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided:
                    value.mul_(1 - torch.rand((), generator=generator) / 100)
        return made

    def optimizers(self):
        """Return the optimizers, which step in turn. AdamW's epsilon keeps it from amplifying rounding errors."""
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        if not parameters:
            return []
        return [torch.optim.SGD(parameters, 0.01, momentum=0.9), torch.optim.AdamW(parameters, 0.01, eps=0.01)]

    def run(self, optimizers, around, record):
        """Train, with each call of the model inside ``around()``; pass the values to compare to ``record``."""
        for optimizer in optimizers or [None]:
            inputs, named = tree_map(_copied, self.inputs)
            self.model.zero_grad()
            with around():
                outputs = self.model(*inputs, **named)
            record("outputs", tree_leaves(outputs))
            loss = loss_of(outputs)
            if loss is not None:
                loss.backward()
            tensors = [*filter(torch.is_tensor, tree_leaves((inputs, named))), *self.model.parameters()]
            record("gradients", [each.grad for each in tensors if each.is_leaf])
            if optimizer is not None:
                optimizer.step()


def _copied(value):
    if not torch.is_tensor(value):
        return copy.deepcopy(value)
    return value.detach().clone().requires_grad_(value.requires_grad)


def in_fp64_too(value):
    """Return a tensor in double its precision, with its own gradient; return other values unchanged."""
    if not torch.is_tensor(value) or value.dtype not in _WIDER:
        return value
    return value.detach().to(_WIDER[value.dtype]).requires_grad_(value.requires_grad)


def loss_of(outputs):
    """Return a loss that depends on all values of the outputs, with distinct weights near one, or None."""
    losses = []
    for value in filter(torch.is_tensor, tree_leaves(outputs)):
        if value.requires_grad and value.numel():
            value = value.to_dense() if value.layout is not torch.strided else value
            value = torch.view_as_real(value) if value.is_complex() else value
            value = value if value.dtype is torch.float64 else value.float()
            weights = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
            losses.append((value * weights).mean() * min(value.numel(), 16))
    return sum(losses) if losses else None


class Outcome(NamedTuple):
    """The results of a training, by kind, as lists of tensors and other values; its error; and the remaining state."""

    found: dict
    error: str | None
    left: list


def train(program, accelerate=None, around=contextlib.nullcontext):
    """Train the program, which should be a copy, within ``accelerate(model, optimizers)``; return its `Outcome`."""
    seed(1)
    found, error, optimizers, before = {}, None, [], _process()

    def record(kind, values):
        found.setdefault(kind, []).extend(map(_kept, values))

    try:
        optimizers = program.optimizers()
        with accelerate(program.model, optimizers) if accelerate else contextlib.nullcontext():
            program.run(optimizers, around, record)
    except Exception as raised:
        error = type(raised).__name__
        found["error"] = [f"{error}: {raised}"[:300]]
    record("parameters", program.model.parameters())
    record("buffers", program.model.buffers())
    record("states", [state[name] for each in optimizers for state in each.state.values() for name in sorted(state)])
    record("random", [torch.get_rng_state()])
    left = [f"process: {old} became {new}" for old, new in zip(before, _process(), strict=True) if old != new]
    return Outcome(found, error, left + _structure(program.model, optimizers))


def _kept(value):
    if not torch.is_tensor(value):
        return value if isinstance(value, (bool, int, float, str)) else None
    value = (value.detach().to_dense() if value.layout is not torch.strided else value.detach()).clone()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def seed(number):
    """Seed all random number generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _process():
    """Return the state of the process that a run changes."""
    functions = nn.Module.__call__, torch.optim.SGD.step, torch.nn.functional.cross_entropy, torch.Tensor.backward
    modes = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()
    return torch.get_num_threads(), torch.get_default_dtype(), *modes, *functions


def _structure(model, optimizers):
    """Return the other state of models and optimizers, as lines: classes, fields, hooks, layouts, options."""
    lines = []
    for name, module in model.named_modules():
        hooks = [len(value) for field, value in vars(module).items() if field.endswith("_hooks")]
        lines.append(f"module {name}: {type(module)} {sorted(vars(module))} {hooks}")
    lines += [f"value {name}: {_described(value)}" for name, value in model.state_dict(keep_vars=True).items()]
    for optimizer in optimizers:
        kept = optimizer.state_dict()
        lines.append(f"optimizer: {type(optimizer)} {sorted(vars(optimizer))} {sorted(kept)}")
        for kind, values in (*(("group", each) for each in kept["param_groups"]), *kept["state"].items()):
            lines += [f"{kind} {field}: {_described(value)}" for field, value in values.items()]
    return lines


def _described(value):
    if not torch.is_tensor(value):
        return repr(value) if isinstance(value, (bool, int, str, list, type(None))) else type(value).__name__
    strides = value.stride() if value.layout is torch.strided else ()
    strides = [stride for size, stride in zip(value.shape, strides, strict=False) if size > 1]  # others are arbitrary
    return f"{type(value)} {value.dtype} {value.requires_grad} {value.layout} {strides}"
