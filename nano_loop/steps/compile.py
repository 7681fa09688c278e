"""Compiles the repeated blocks of a model, each kind once, or the whole model, in place with `torch.compile`."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from nano_loop.errors import NanoError
from nano_loop.patching.lifetime import WeakIdKeyDictionary, weakly
from nano_loop.patching.members import named_buffers_of, named_parameters_of, parameters_of
from nano_loop.patching.patch_table import entry_set
from nano_loop.patching.torch_private_compiler import (
    call_compiled,
    forget_compiled,
    is_compiled,
    mode_options,
    plain_call,
)
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name
from nano_loop.steps.step import SkipReason, Step
from nano_loop.storage.cache_folder import cache_folder, inductor_folder
from nano_loop.storage.trusted_files import open_folder

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def arguments_with(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's arguments of `torch.compile`, extended so that Inductor draws as the plain loop does."""
    arguments = dict(options)
    if arguments.get("backend") not in (None, "inductor"):
        return arguments
    # torch accepts either a mode or options.
    modes = mode_options(arguments.pop("mode", None), arguments.get("dynamic"))
    # Random numbers come from torch's generator, in order. Inductor's own would be seeded from it, which leaves it in
    # another state than the plain loop does: the next shuffle of a loader would differ.
    # Precompiled headers are always stored in Inductor's shared folder, regardless of `own_cache`.
    ours = {"fallback_random": True, "cpp_cache_precompile_headers": False}
    arguments["options"] = {**ours, **modes, **(arguments.get("options") or {})}
    return arguments


@contextmanager
def own_cache() -> Iterator[None]:
    """Make Inductor store compiled code below nano_loop's cache folder, unless the user has set a folder.

    Its default folder in the one for temporary files belongs to whoever creates it first.
    """
    with ExitStack() as stack:
        if os.environ.get(_CACHE) in (None, inductor_folder()):
            folder = _trusted_folder(cache_folder()) or stack.enter_context(
                tempfile.TemporaryDirectory(prefix="torchinductor-", ignore_cleanup_errors=True)
            )
            stack.enter_context(entry_set(os.environ, _CACHE, folder))
        yield


def _trusted_folder(folder: Path | None) -> str | None:
    """Return the folder below nano_loop's cache folder; None if there is none or another user can change it."""
    if folder is None:
        return None
    try:
        os.close(open_folder(folder))
    except (OSError, NanoError):
        return None
    return str(folder / "torchinductor")


#: The minimum number of blocks per compiled block. With fewer, compiling the whole model takes as long.
_REPEATS = 2


def repeated_blocks(model: nn.Module) -> list[list[nn.Module]]:
    """Return the repeated blocks of a model, in groups of equal structure, or an empty list.

    These are the modules in the outermost lists and sequences that contain two of equal structure.
    """
    groups: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for block in _blocks_in(model):
        same_structure = groups[_structure(block)]
        if not any(other is block for other in same_structure):
            same_structure.append(block)
    blocks = sum(map(len, groups.values()))
    return [] if blocks < _REPEATS * len(groups) else list(groups.values())


def described(groups: list[list[nn.Module]]) -> str:
    """Return the number of blocks per class, for the report."""
    counts = Counter(class_name(block) for group in groups for block in group)
    return ", ".join(f"{count} blocks of {name}" for name, count in counts.items())


def _blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of the outermost lists."""
    children = list(module.children())
    if isinstance(module, nn.ModuleList | nn.Sequential) and _repeats(children):
        yield from (child for child in children if _is_block(child))
        return
    for child in children:
        yield from _blocks_in(child)


def _repeats(modules: list[nn.Module]) -> bool:
    structures = Counter(_structure(module) for module in modules if _is_block(module))
    return max(structures.values(), default=0) > 1


def _is_block(module: nn.Module) -> bool:
    """Whether a module contains something to fuse: at least two other modules."""
    return len(list(module.modules())) > 2 and any(True for _ in parameters_of(module))


def _structure(module: nn.Module) -> Hashable:
    """Return a key that is equal for modules for which torch compiles the same code."""
    modules = tuple((name, type(submodule)) for name, submodule in module.named_modules())
    tensors = [*named_parameters_of(module, remove_duplicate=False), *named_buffers_of(module, remove_duplicate=False)]
    shapes = tuple(
        (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for name, tensor in tensors
    )
    return modules, shapes


_numbers = itertools.count()


class Compile(Step):
    """Compiles modules in place, which keeps their identity, their keys and their classes.

    Compiling takes ten seconds to a minute, and the result is rarely much faster than with the other steps.
    """

    name = "compile"
    required = False

    @override
    def begin(self) -> None:
        self._compiled: Any = WeakIdKeyDictionary()  # report lines by model

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        if parts.models and all(isinstance(model, torch.jit.ScriptModule) for model in parts.models):
            return SkipReason("scripted", "the model is scripted")
        return None if self._uncompiled(parts) else SkipReason("compiled", "the model is already compiled")

    @override
    def apply(self, parts: TrainingObjects) -> str:
        if not self._compiled:
            self.undoing.enter_context(own_cache())
        models = self._uncompiled(parts)
        for model in models:
            if model not in self._compiled:
                self._compiled[model] = self._compile(model)
        said = dict.fromkeys(self._compiled[model] for model in models)
        return f"torch.compile, at the first call: {', '.join(said)}"

    def _uncompiled(self, parts: TrainingObjects) -> list[nn.Module]:
        """Return the models that the user has not compiled."""
        fitting = [model for model in parts.models if not isinstance(model, torch.jit.ScriptModule)]
        return [model for model in fitting if model in self._compiled or not is_compiled(model)]

    def _compile(self, model: nn.Module) -> str:
        """Compile a model or its blocks, and return the report line."""
        groups = [] if self.options.compile == "whole" else repeated_blocks(model)
        arguments = arguments_with(self.options.compile if isinstance(self.options.compile, dict) else {})
        for group in groups or [[model]]:
            compiled = torch.compile(_caller(class_name(group[0])), **arguments)
            for module in group:
                if not is_compiled(module):  # by the user
                    self.undoing.callback(weakly(forget_compiled, module))
                    call_compiled(module, compiled)
        return described(groups) if groups else f"all of {class_name(model)}"


def _caller(name: str) -> Callable[..., Any]:
    """Return a function that calls a module, with its own code and name: torch limits and compares calls by these."""
    code = plain_call.__code__.replace(co_name=f"{name}_{next(_numbers)}")
    return FunctionType(code, plain_call.__globals__, code.co_name)
