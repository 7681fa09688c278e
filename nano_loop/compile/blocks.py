"""Finds the repeated blocks of a model, such as the layers of a transformer. Each kind is compiled only once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator

from torch import nn

from nano_loop.patching.members import named_buffers_of, named_parameters_of, parameters_of
from nano_loop.runtime.objects.training_objects import class_name

#: The minimum number of blocks per compiled block. With fewer, compiling the whole model takes as long.
_REPEATS = 2


def repeated_blocks(model: nn.Module) -> list[list[nn.Module]]:
    """Return the repeated blocks of a model, in groups of equal structure, or an empty list.

    The blocks are the modules in the outermost lists and sequences that contain two modules of equal structure. The
    other modules of such a list are included in separate groups, since code around a block is not compiled.
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
