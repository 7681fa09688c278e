"""What happens at every outermost call into a model: layers of work around it, such as autocast.

A call is outermost when no other call into a set-up model is under way in its thread. Besides `model(x)` that is
`model.encoder(x)`, `model[0](x)`, `model.forward(x)` and `model.my_loss(x)`.

Nothing is hung on the model. While at least one model has layers, `torch.nn.Module.__call__` and the public methods
of the model's own classes are replaced by functions that look the module up in a table and otherwise pass through.
So `type(layer) is nn.Linear` holds inside the loop, and copies and pickles are plain without any help.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from nano_loop.intercept.attributes import replaced
from nano_loop.intercept.torch_private import in_backward

#: A function and its arguments go in, its outputs come out.
Call = Callable[..., Any]
#: Is given the next call inwards and returns its own, which may change the arguments and the outputs.
Layer = Callable[[Call], Call]


class _InsideModel(threading.local):
    """Whether this thread is inside a set-up model."""

    inside = False


# torch's own classes are entered through __call__; replacing their methods too would touch every model there is.
_NOT_THE_USERS = frozenset({"torch", "builtins", "typing", "abc", "collections"})

_thread = _InsideModel()
_entries: dict[int, Entry] = {}  # by the id of a module
_FORWARD = frozenset({nn.Module.__call__.__name__, "__call__", "forward"})


class Entry:
    """The layers around the outermost calls into one model, outside in."""

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}  # kept alive, so that their ids are not used again
        self._called: set[int] = set()
        self._layers: dict[str, Layer] = {}
        self._call: Call = _innermost

    def add(self, name: str, layer: Layer) -> None:
        """Put `layer` inside the others; under a name that is taken, in the place of that one."""
        self._layers[name] = layer
        call: Call = _innermost
        for each in reversed(self._layers.values()):
            call = each(call)
        self._call = call

    def cover(self, modules: Iterable[nn.Module]) -> None:
        """Let calls into these modules come here."""
        added = {id(module): module for module in modules}
        self._modules.update(added)
        _entries.update(dict.fromkeys(added, self))

    def uncover(self) -> None:
        """Let no call come here any more."""
        for key in self._modules:
            if _entries.get(key) is self:
                del _entries[key]

    def is_way_in(self, module: nn.Module) -> bool:
        """Whether this call into `module` is the loop's.

        An activation checkpoint inside a model calls modules again during the backward. What is to surround them then
        was around them in the forward, and the checkpoint has seen to it, unless the loop had called them directly.
        """
        if torch.compiler.is_compiling():
            return True
        if in_backward():
            return id(module) in self._called
        self._called.add(id(module))
        return True

    def __call__(self, function: Call, *args: Any, **kwargs: Any) -> Any:
        """Call `function` inside the layers; calls that it makes into models pass through."""
        _thread.inside = True
        try:
            return self._call(function, *args, **kwargs)
        finally:
            _thread.inside = False


class Entries:
    """The entries of one run."""

    def __init__(self) -> None:
        self._by_model: dict[int, Entry] = {}
        self._undoing = ExitStack()

    def add(self, model: nn.Module, name: str, layer: Layer) -> None:
        """Put `layer` around every outermost call into `model` and its submodules, until `close`.

        Parameters
        ----------
        model : torch.nn.Module
            The model. It is not changed.
        name : str
            The layer's name; a second layer of that name takes the place of the first.
        layer : callable
            Is given the next call inwards and returns its own.
        """
        if id(model) not in self._by_model:
            self._by_model[id(model)] = self._open(model)
        self._by_model[id(model)].add(name, layer)

    def close(self) -> None:
        """Take all layers of this run away, and leave those of a run around it."""
        self._by_model.clear()
        self._undoing.close()

    def _open(self, model: nn.Module) -> Entry:
        modules = list(_called_by_loops(model))
        for owner, name in _ways_in(modules):
            self._undoing.enter_context(replaced(owner, name, _through_entry))
        self._undoing.callback(register_module_module_registration_hook(_cover_newcomer).remove)
        entry = Entry()
        outer_run = {id(each): _entries[id(each)] for each in modules if id(each) in _entries}
        self._undoing.callback(_entries.update, outer_run)
        self._undoing.callback(entry.uncover)
        entry.cover(modules)
        return entry


def is_forward(function: Call) -> bool:
    """Whether `function`, which a layer is given to call, is a module's call or its ``forward``, no other method."""
    return getattr(function, "__name__", None) in _FORWARD


def _cover_newcomer(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Let a module that the loop puts into a set-up model be one of its ways in."""
    entry = _entries.get(id(parent))
    if entry is not None and module is not None:
        entry.cover(each for each in _called_by_loops(module) if id(each) not in _entries)


def _called_by_loops(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of `model`, without those that a mere `layer.weight` calls to compute a parametrization."""
    lists = [module for module in model.modules() if isinstance(module, ParametrizationList)]
    parametrizations = {part for each in lists for part in each.modules()}
    yield from (module for module in model.modules() if module not in parametrizations)


def _innermost(function: Call, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _ways_in(modules: list[nn.Module]) -> Iterator[tuple[type, str]]:
    """Yield the class attributes through which a loop can call into one of `modules`."""
    yield nn.Module, "__call__"
    for owner in {owner for module in modules for owner in type(module).__mro__}:
        if owner.__module__.partition(".")[0] not in _NOT_THE_USERS:
            yield from ((owner, name) for name, value in vars(owner).items() if _computes(name, value))


def _computes(name: str, value: object) -> bool:
    """Whether a class attribute is a method that a loop may call to compute something."""
    if name not in ("forward", "__call__") and (name.startswith("_") or hasattr(nn.Module, name)):
        return False
    lazy = inspect.isgeneratorfunction(value) or inspect.iscoroutinefunction(value)
    return inspect.isfunction(value) and not lazy


def _through_entry(original: Call) -> Call:
    """Make the function that stands in for `original`."""

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _thread.inside:
            return original(self, *args, **kwargs)
        entry = _entries.get(id(self))
        if entry is None or not entry.is_way_in(self):
            return original(self, *args, **kwargs)
        return entry(original, self, *args, **kwargs)

    return call
