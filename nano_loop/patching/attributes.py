"""Replaces attributes of classes and modules during a run and restores them exactly.

The user's objects stay unchanged (`type(layer) is nn.Linear`, `copy.deepcopy`, `pickle`) only if nothing is attached to
them. So the replacement is attached to the class, once, and looks the object up in a table.

Methods of the user's classes are replaced for instances only. The class returns the original, because `pickle` looks it
up by name, and cloudpickle and dill pickle it with a class of the script.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from nano_loop.patching.patch_table import shared_change, values_in_force
from nano_loop.patching.torch_private_compiler import TRACES_BINDING, never_compiled

_ABSENT = object()


class _Replacement(NamedTuple):
    owner: Any
    name: str
    original: Any
    replacement: Any

    def put(self) -> None:
        setattr(self.owner, self.name, self.replacement)

    def restore(self) -> bool:
        """Restore the original, unless other code has wrapped the replacement in the meantime."""
        if vars(self.owner).get(self.name) is not self.replacement:
            return False
        if self.original is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)
        return True


class _ReplacedMethod:
    """A class attribute that binds a replacement to instances but returns the original for the class and picklers.

    `torch.compile` traces the replacement only if it is a plain function.
    """

    def __init__(self, original: FunctionType, replacement: FunctionType) -> None:
        self.original = original
        self.replacement = replacement

    def __get__(self, instance: object, kind: type | None = None) -> Any:
        if instance is None:
            return self.original
        if TRACES_BINDING:
            return self.replacement.__get__(instance, kind)
        return MethodType(self.replacement, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        return itemgetter(0), ((self.original,),)  # nano_loop may not be installed where it is unpickled


# Compiled separately, torch would call it again to get the bound method, recursing infinitely.
never_compiled(_ReplacedMethod.__get__)

_suspension = threading.RLock()


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Replace ``owner.name`` until the last user of the replacement has exited.

    `owner` is a class or a module. Subclasses of a class inherit the replacement. If a class inherits the attribute,
    the replacement is set on the class itself. For methods, a user's class returns the original, as in
    ``Net.score(model, x)``.

    `make` accepts the attribute, as returned by ``getattr(owner, name)``, or None if it does not exist, and returns the
    replacement. It is called for the first user only, so use the same `make` for all replacements of an attribute.
    """
    return shared_change((owner, name), lambda: _replaced(owner, name, make))


@contextmanager
def suspended(base: type) -> Iterator[None]:
    """Restore the attributes of `base` and its subclasses during the body, in all threads, for code that reads them."""
    with _suspension:
        restored = [replacement for replacement in _replacements_in(base) if replacement.restore()]
        try:
            yield
        finally:
            for replacement in _replacements_in(base):  # except those whose last user has since exited
                if any(replacement is other for other in restored):
                    replacement.put()


def defined_in(owner: type) -> Mapping[str, Any]:
    """Return a class's own attributes, with the originals of replaced ones."""
    values = vars(owner).items()
    return {name: value.original if isinstance(value, _ReplacedMethod) else value for name, value in values}


def module_of(function: Any) -> str:
    """Return the name of the module that defines a function, even if `functools.wraps` set another name."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def has_own(kind: type, *names: str) -> bool:
    """Whether the given methods of a class and its bases are the ones they define, not patched by the program."""
    defined = ((base, vars(base)[name]) for base in kind.__mro__ for name in names if name in vars(base))
    return all(module_of(method) == base.__module__ for base, method in defined)


def library(owner: type) -> str:
    """Return the name of the top-level package that defines a class."""
    return owner.__module__.partition(".")[0]


def _replacements_in(base: type) -> list[_Replacement]:
    replacements = (value for value in values_in_force() if isinstance(value, _Replacement))
    return [made for made in replacements if isinstance(made.owner, type) and issubclass(made.owner, base)]


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[Any]:
    original, current = vars(owner).get(name, _ABSENT), getattr(owner, name, None)
    value = make(current)
    if isinstance(owner, type) and isinstance(current, FunctionType) and isinstance(value, FunctionType):
        # Subclasses also call methods of torch's classes as `nn.Conv2d.forward(self, x)`.
        value = value if library(owner) == "torch" else _ReplacedMethod(current, value)
    made = _Replacement(owner, name, original, value)
    made.put()
    try:
        yield made
    finally:
        made.restore()
