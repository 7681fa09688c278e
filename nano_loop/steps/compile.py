"""Compiles the models in place with `torch.compile`, or the blocks that they repeat."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from nano_loop.compiling.blocks import described, repeated_blocks
from nano_loop.cpu import Machine
from nano_loop.distributed.ranks import ALONE, Ranks
from nano_loop.intercept.calls import Entries
from nano_loop.intercept.torch_private import call_compiled, forget_compiled, is_compiled, mode_options, plain_call
from nano_loop.options import Options
from nano_loop.parts import Parts, class_name
from nano_loop.steps.step import Step

_PASS = "pre_grad_custom_pass"
_number = itertools.count()


class Compile(Step):
    """Compiles what a model repeats, once, or else the model, in place: with its identity, its keys and its class.

    The step is disabled by default. On a CPU, compiling a training step takes from ten seconds to a minute, and is
    seldom faster than the other steps.
    """

    name = "compile"
    required = False

    def __init__(self, config: Options, machine: Machine, entries: Entries, ranks: Ranks = ALONE) -> None:
        super().__init__(config, machine, entries, ranks)
        self._compiled: dict[int, str] = {}  # by the ids of models, what the report says

    def skip_reason(self, parts: Parts) -> str | None:
        """See `Step.skip_reason`."""
        if parts.models and all(isinstance(model, torch.jit.ScriptModule) for model in parts.models):
            return "the model is scripted"
        return "the model is compiled already" if not self._uncompiled(parts) else None

    def apply(self, parts: Parts) -> str:
        """See `Step.apply`."""
        for model in self._uncompiled(parts):
            if id(model) not in self._compiled:
                self._compiled[id(model)] = self._compile(model)
        said = dict.fromkeys(self._compiled[id(model)] for model in self._uncompiled(parts))
        return f"torch.compile, at the first call: {', '.join(said)}"

    def _uncompiled(self, parts: Parts) -> list[nn.Module]:
        """Return the models that the user has not compiled."""
        fitting = [model for model in parts.models if not isinstance(model, torch.jit.ScriptModule)]
        return [model for model in fitting if id(model) in self._compiled or not is_compiled(model)]

    def _compile(self, model: nn.Module) -> str:
        """Compile a model or its blocks, and return what the report says."""
        groups = [] if self.config.compile == "whole" else repeated_blocks(model)
        for group in groups or [[model]]:
            compiled = torch.compile(_caller(class_name(group[0])), **self._arguments())
            for module in group:
                self.undoing.callback(forget_compiled, module)
                call_compiled(module, compiled)
        return described(groups) if groups else f"all of {class_name(model)}"

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile`: the user's, and what keeps our operators whole."""
        given = dict(self.config.compile) if isinstance(self.config.compile, dict) else {}
        if given.get("backend", "inductor") not in (None, "inductor"):
            return given
        from nano_loop.compiling.graphs import ATTENTION, CROSS_ENTROPY, DROPOUT, keeping

        options = {**mode_options(given.pop("mode", None), given.get("dynamic")), **(given.get("options") or {})}
        kept=[ATTENTION,DROPOUT,CROSS_ENTROPY]
        return {**given, "options": {"fallback_random": True, _PASS: keeping(kept), **options}}


def _caller(name: str) -> Callable[..., Any]:
    """Return a function that calls a module.

    torch limits how often it compiles one code object, and takes the sizes with which another call has entered one of
    the same name and line for sizes that vary. So each is an object of its own, under a name of its own.
    """
    code = plain_call.__code__.replace(co_name=f"{name}_{next(_number)}")
    return FunctionType(code, plain_call.__globals__, code.co_name)
