"""Replaces attributes of classes and modules during a run, and restores them exactly.

The user's objects are unchanged (`type(layer) is nn.Linear`, `copy.deepcopy`, `pickle`) only if nothing is attached to
the objects themselves. So the replacement is attached to the class, once, and looks the object up in a table.

A method of the user's classes is replaced for instances alone. Its class returns the original: `pickle` looks that up
by name, and cloudpickle and dill send it with a class of the script.
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
    """A class attribute that binds a replacement to instances, and that is the original for the class and for picklers.

    Parameters
    ----------
    original, replacement : function
        `torch.compile` traces the replacement only where it is a plain function.
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
        return itemgetter(0), ((self.original,),)  # another process may be without nano_loop


# What torch makes of it alone gets the bound method by calling it again, without an end.
never_compiled(_ReplacedMethod.__get__)

_suspension = threading.RLock()


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Replace ``owner.name`` until the last user of the replacement has exited.

    Parameters
    ----------
    owner : type or module
        Subclasses of a class inherit the replacement.
    name : str
        The name of the attribute. If a class inherits it, the replacement is set on the class itself. A class of the
        user's returns the original of a method, as in ``Net.score(model, x)``.
    make : callable
        Takes the attribute, as returned by ``getattr(owner, name)``, or None if there is none, and returns the
        replacement. It is called for the first user only, so use the same `make` for all replacements of an attribute.
    """
    return shared_change((owner, name), lambda: _replaced(owner, name, make))


@contextmanager
def suspended(base: type) -> Iterator[None]:
    """Restore the attributes of `base` and its subclasses for the body, in all threads, for code that reads them."""
    with _suspension:
        restored = [replacement for replacement in _replacements_in(base) if replacement.restore()]
        try:
            yield
        finally:
            for replacement in _replacements_in(base):  # without those whose last user exited in the meantime
                if any(replacement is other for other in restored):
                    replacement.put()


def defined_in(owner: type) -> Mapping[str, Any]:
    """Return the attributes that a class itself has, without their replacements."""
    values = vars(owner).items()
    return {name: value.original if isinstance(value, _ReplacedMethod) else value for name, value in values}


def module_of(function: Any) -> str:
    """Return the name of the module where a function was defined. `functools.wraps` copies that of another one."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def has_own(kind: type, *names: str) -> bool:
    """Whether methods of a class and its bases, as far as there are such, are their own: the program has put none."""
    defined = ((base, vars(base)[name]) for base in kind.__mro__ for name in names if name in vars(base))
    return all(module_of(method) == base.__module__ for base, method in defined)


def library(owner: type) -> str:
    """Return the name of the package that a class is from."""
    return owner.__module__.partition(".")[0]


def _replacements_in(base: type) -> list[_Replacement]:
    replacements = (value for value in values_in_force() if isinstance(value, _Replacement))
    return [made for made in replacements if isinstance(made.owner, type) and issubclass(made.owner, base)]


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[Any]:
    original, current = vars(owner).get(name, _ABSENT), getattr(owner, name, None)
    value = make(current)
    if isinstance(owner, type) and isinstance(current, FunctionType) and isinstance(value, FunctionType):
        # What torch's classes define is called by their subclasses as `nn.Conv2d.forward(self, x)`, too.
        value = value if library(owner) == "torch" else _ReplacedMethod(current, value)
    made = _Replacement(owner, name, original, value)
    made.put()
    try:
        yield made
    finally:
        made.restore()
