"""Compiles the models in place with `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nano_loop.cpu import Machine
from nano_loop.distributed.ranks import ALONE, Ranks
from nano_loop.intercept.calls import Entries
from nano_loop.intercept.torch_private import forget_compiled, is_compiled
from nano_loop.options import Options
from nano_loop.parts import Parts
from nano_loop.steps.step import Step


class Compile(Step):
    """Calls `torch.nn.Module.compile`, which keeps the module's identity, keys and class.

    The step is disabled by default. On a CPU, compiling a training step takes from ten seconds to a minute, and is
    seldom faster than the other steps.
    """

    name = "compile"
    required = False

    def __init__(self, config: Options, machine: Machine, entries: Entries, ranks: Ranks = ALONE) -> None:
        super().__init__(config, machine, entries, ranks)
        self._compiled: set[int] = set()  # the ids of models

    def skip_reason(self, parts: Parts) -> str | None:
        """See `Step.skip_reason`."""
        if parts.models and all(isinstance(model, torch.jit.ScriptModule) for model in parts.models):
            return "the model is scripted"
        return "the model is compiled already" if not self._uncompiled(parts) else None

    def apply(self, parts: Parts) -> str:
        """See `Step.apply`."""
        for model in self._uncompiled(parts):
            if not is_compiled(model):
                self._compile(model)
        return "torch.compile, at the first call"

    def _uncompiled(self, parts: Parts) -> list[nn.Module]:
        """Return the models that the user has not compiled."""
        fitting = [model for model in parts.models if not isinstance(model, torch.jit.ScriptModule)]
        return [model for model in fitting if id(model) in self._compiled or not is_compiled(model)]

    def _compile(self, model: nn.Module) -> None:
        arguments: dict[str, Any] = self.config.compile if isinstance(self.config.compile, dict) else {}
        self.undoing.callback(forget_compiled, model)
        self._compiled.add(id(model))
        model.compile(**arguments)
