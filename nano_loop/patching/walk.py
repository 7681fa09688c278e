"""A bounded breadth-first traversal of the user's objects that visits each object once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import CodeType
from typing import Any

CONTAINERS = (list, tuple, set, frozenset, dict)


def walk(
    start: Iterable[Any], contents: Callable[[Any], Iterable[Any]], *, depth: int = 1000, most: int = 1 << 20
) -> Iterator[Any]:
    """Yield objects, then their contents, up to a `depth`, and so on, at most `most`. Cycles are allowed."""
    seen: dict[int, Any] = {}  # kept alive, so that their ids are not reused
    level = start
    for _ in range(depth + 1):
        new = []
        for value in level:
            if id(value) not in seen:
                if len(seen) >= most:
                    return
                seen[id(value)] = value
                new.append(value)
                yield value
        if not new:
            return
        level = (item for value in new for item in contents(value))


def find(kind: type | tuple[type, ...], value: Any) -> Iterator[Any]:
    """Yield every instance of `kind` in `value`: itself, or in lists, tuples, sets and dicts, without duplicates."""
    if isinstance(value, kind):
        return iter((value,))
    if type(value) in (list, tuple) and all(isinstance(item, kind) for item in value):  # saves the walk
        return iter({id(item): item for item in value}.values())
    reached = walk([value], lambda holder: () if isinstance(holder, kind) else items_of(holder))
    return (item for item in reached if isinstance(item, kind))


def items_of(value: Any) -> Iterable[Any]:
    """Return the items of a container, or the values of a dict; empty for other objects.

    Subclasses are read as their built-in base class, because their own code may compute the items or raise.
    """
    kind = _container(value)
    return () if kind is None else dict.values(value) if kind is dict else kind.__iter__(value)


def length_of(value: Any) -> int:
    """Return the number of items of a container, read the same way; 0 for other objects."""
    kind = _container(value)
    return 0 if kind is None else kind.__len__(value)


def _container(value: Any) -> Any:
    return next((kind for kind in CONTAINERS if issubclass(type(value), kind)), None)


def named_attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of an object's attributes without running its code, such as properties."""
    with suppress(TypeError):  # it has only slots
        yield from [*vars(value).items()]
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name in ("__dict__", "__weakref__"):
                continue
            is_private = name.startswith("__") and not name.endswith("__")
            attribute = f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
            with suppress(AttributeError):  # the slot is unassigned
                yield attribute, object.__getattribute__(value, attribute)


def code_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions and classes defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_in(constant)
