"""What the program has in the modules that a call reaches: read here, compared and set in a worker by `state_taken`.

Each object with data (a dict, a list, an instance, a tensor) has a place: a module, and the steps from it. Picklers of
both sides know the objects at places beforehand, so that what is sent refers to the worker's own ones.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, copy_context
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from nano_loop.distributed.payload.code_reductions import at_its_name, by_value, is_empty
from nano_loop.distributed.payload.faithful_pickler import FaithfulPickler
from nano_loop.distributed.payload.places import SCALARS, Place, Sent, are_scalars, is_plain, is_simple
from nano_loop.distributed.payload.reached_modules import (
    NOT_COMPARED,
    ReachedModules,
    is_cache,
    is_program,
    is_sent,
    package_of,
)
from nano_loop.patching.attributes import defined_in
from nano_loop.patching.torch_private_autograd import TENSOR_HOOKS
from nano_loop.patching.walk import named_attributes_of

#: Bytes of an attribute of a module from which it is not sent.
LARGEST = 64 * 2**20
_TOO_LARGE = f"has over {LARGEST // 2**20} MB"
_ITEMS = {kind: ("items", kind) for kind in (dict, list, set)}
_IN_C = ("ctypes", "_ctypes")  # handles and addresses, which mean nothing in another process
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class ModuleState:
    """The data of modules, as a worker is to have them.

    Parameters
    ----------
    reached : ReachedModules
        The modules.

    Attributes
    ----------
    places : list of Place
        Where there are data.
    contents : list
        What is there, in the same order.
    objects : list
        The objects that picklers know, and their places' numbers.
    not_compared : dict of str to str
        What functions name and cannot be compared, with why.
    """

    def __init__(self, reached: ReachedModules) -> None:
        self.places: list[Place] = []
        self.contents: list[Any] = []
        self.objects: list[tuple[int, Any]] = []
        self.not_compared: dict[str, str] = {}
        self._reached = reached
        self._numbers: dict[int, int] = {}  # of places, by the ids of their objects
        self._all_sent: list[tuple[Sent, tuple[str, str], bool]] = []
        self._queue: deque[tuple[Callable[[Any, int], Any], int, Any]] = deque()  # what is to be read
        self._objects: dict[type, tuple[Any, ...] | None] = {}  # what is made of instances, by class
        self._top = ("", "")  # the module and the attribute that are being read
        self._is_program = True
        self._size = 0
        self._probe: _Probe | None = None
        self._is_imported: dict[str, bool] = {}  # whether code of a module is, rather than sent
        for module in sorted(reached.modules.values(), key=is_program, reverse=True):  # it may set where libraries are
            self._read_module(module.__name__, module)
        self._leave_out()

    @property
    def memo(self) -> dict[int, tuple[int, Any]]:
        """What a pickler knows beforehand."""
        return {id(value): (number, value) for number, (_, value) in enumerate(self.objects)}

    def memo_of_arguments(self, memo: dict[int, tuple[int, Any]]) -> dict[int, tuple[int, Any]]:
        """Return what a pickler knows when the state is written, without what holds something that is left out.

        The state leaves such an object to the worker; as an argument it is an error.
        """
        for number, (place, value) in enumerate(self.objects):
            held = self.contents[place][1] if self.places[place][2][0] == "object" else ()
            if any(type(part) is Sent and part.why for _, part in held):
                other = object()  # the worker counts as many
                memo[id(other)] = number, other
                del memo[id(value)]
        return memo

    # --- modules, classes, functions ---

    def _read_module(self, name: str, module: ModuleType) -> None:
        self._is_program = is_program(module)
        values: dict[str, Any] = {}
        names: dict[str, tuple[str, str]] = {}
        number = self._placed(-1, (), ("module", name))
        self.contents[number] = values, names
        for attribute, value in vars(module).copy().items():
            if attribute.startswith("__") or issubclass(type(value), ModuleType):
                continue
            self._top, self._size = (name, attribute), 0
            before = len(self.places), len(self.objects), len(self._all_sent)
            if self._is_own_code(value):
                names[attribute] = value.__module__, value.__qualname__
                if value.__module__ == name:
                    self._read_code(value)
            elif self._is_program or not _is_code(value):
                values[attribute] = self._encoded(value, number, (("attribute", attribute),))
            while self._queue and self._size <= LARGEST:
                read, at, held = self._queue.popleft()
                self.contents[at] = read(held, at)
            if self._size > LARGEST:
                self._forget(*before)
                left_out = values[attribute] = Sent(None, number, (("attribute", attribute),))
                left_out.leave_out(_TOO_LARGE)
                self._note_not_compared(self._top, left_out)

    def _forget(self, places: int, objects: int, sent: int) -> None:
        self._numbers = {key: number for key, number in self._numbers.items() if number < places}
        del self.places[places:], self.contents[places:], self.objects[objects:], self._all_sent[sent:]
        self._queue.clear()

    def _read_code(self, code: type | FunctionType) -> None:
        """Read what a class or a function of a module holds."""
        if isinstance(code, FunctionType):
            defaults = (*(code.__defaults__ or ()), *(code.__kwdefaults__ or {}).values())
            has_variables = code.__code__.co_freevars not in ((), ("__class__",))
            if self._is_program and (has_variables or vars(code) or not all(map(is_simple, defaults))):
                number = self._placed(-1, (), ("code", code.__module__, code.__qualname__, code.__code__))
                self._queue.append((self._function_contents, number, code))
        elif not issubclass(code, Enum) and (data := self._data_of(code)):
            number = self._placed(-1, (), ("code", code.__module__, code.__qualname__))
            self.contents[number] = [
                (name, self._encoded(value, number, (("attribute", name),))) for name, value in data
            ]

    def _data_of(self, kind: type) -> list[tuple[str, Any]]:
        """Return the data among the attributes of a class, and read its methods."""
        data = []
        for name, value in [*defined_in(kind).items()]:
            inner: Any = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if self._is_own_code(inner) and inner.__qualname__ == f"{kind.__qualname__}.{name}":
                self._read_code(inner)
                continue
            is_data = not name.startswith(("__", "_abc_")) and not hasattr(type(value), "__set__")
            if is_data and inner is value and (self._is_program or not _is_code(value)):
                data.append((name, value))
        return data

    def _function_contents(self, function: FunctionType, number: int) -> tuple[Any, ...]:
        def encoded(step: str, values: Iterable[tuple[Any, Any]]) -> tuple[tuple[Any, Any], ...]:
            return tuple((key, self._encoded(value, number, ((step, key),))) for key, value in values)

        cells = ((key, cell) for key, cell in enumerate(function.__closure__ or ()) if not is_empty(cell))
        return (
            encoded("default", enumerate(function.__defaults__ or ())),
            encoded("keyword", (function.__kwdefaults__ or {}).items()),
            encoded("cell", ((key, cell.cell_contents) for key, cell in cells)),
            encoded("attribute", vars(function).items()),
        )

    # --- values ---

    def _encoded(self, value: Any, parent: int, steps: tuple[tuple[str, Any], ...]) -> Any:
        """Return what is pickled for a value, and note its place if it is known by one."""
        kind = type(value)
        if kind in SCALARS:
            self._size += len(value) if kind in (str, bytes) else 8
            return value
        if id(value) in self._numbers:
            return value
        if kind is tuple:
            return tuple(self._encoded(part, parent, (*steps, ("item", i))) for i, part in enumerate(value))
        made, read = self._made(value, kind)
        if made is not None:
            number = self._numbers[id(value)] = self._placed(parent, steps, made)
            self.objects.append((number, value))
            self._queue.append((read, number, value))
            return value
        if self._is_named_code(value):  # unless the script's code stands in its place
            is_scripts = isinstance(value, FunctionType) and value.__globals__.get("__name__") in by_value()
            return self._sent(_copied(value), parent, steps) if is_scripts else value
        return self._sent(value, parent, steps)

    def _sent(self, value: Any, parent: int, steps: tuple[tuple[str, Any], ...]) -> Sent:
        sent = Sent(value, parent, steps)
        self._all_sent.append((sent, self._top, self._is_program))
        return sent

    def _placed(self, parent: int, steps: tuple[tuple[str, Any], ...], made: tuple[Any, ...]) -> int:
        self.places.append((parent, steps, made))
        self.contents.append(None)
        return len(self.places) - 1

    def _made(self, value: Any, kind: type) -> tuple[tuple[Any, ...] | None, Callable[[Any, int], Any]]:
        """Return what a worker needs to make such an object (None for one that is sent by value), and what reads it."""
        if kind in _ITEMS:
            return _ITEMS[kind], self._items_of
        if kind in _LOCKS:
            return ("lock", kind is _LOCKS[0]), lambda lock, number: None
        if kind is ContextVar:
            return ("context", value.name), self._context_value
        if kind in (torch.Tensor, nn.Parameter):
            plain = value.layout is torch.strided and value.device.type == "cpu" and value.is_leaf
            is_bare = plain and value.grad is None and not any(getattr(value, name) for name in TENSOR_HOOKS)
            return ("tensor", kind) if is_bare else None, self._tensor_contents
        if kind is np.ndarray:
            plain = not value.dtype.hasobject and value.flags.writeable
            return ("array", value.shape, value.dtype) if plain else None, self._array_contents
        if kind is FunctionType:
            module = value.__globals__.get("__name__")
            is_own = module in self._reached.modules and not self._is_own_code(value)
            return ("function", module, value.__code__) if is_own else None, self._function_contents
        if kind not in self._objects:
            self._objects[kind] = ("object", kind) if self._is_made_here(kind) else None
        return self._objects[kind], self._object_contents

    def _is_made_here(self, kind: type) -> bool:
        return is_plain(kind) and (self._is_named_code(kind) or package_of(kind) in NOT_COMPARED)

    def _is_named_code(self, value: Any) -> bool:
        """Whether a class or a function is imported by another process."""
        if not isinstance(value, (type, FunctionType)):
            return False
        name = value.__module__
        if name not in self._is_imported:
            module = sys.modules.get(name)
            self._is_imported[name] = module is not None and not is_sent(module)
        return self._is_imported[name] and at_its_name(value) is value

    def _is_own_code(self, value: Any) -> bool:
        """Whether a class or a function is imported by another process, and no other code stands in its place."""
        if not self._is_named_code(value):
            return False
        return not isinstance(value, FunctionType) or value.__globals__ is vars(sys.modules[value.__module__])

    def _tensor_contents(self, tensor: torch.Tensor, number: int) -> Any:
        self._size += tensor.nbytes
        return tensor.detach(), tensor.requires_grad

    def _array_contents(self, array: Any, number: int) -> Any:
        self._size += array.nbytes
        return array.view()

    def _context_value(self, variable: ContextVar[Any], number: int) -> Any:
        context = copy_context()
        return (self._encoded(context[variable], number, (("value", None),)),) if variable in context else None

    def _object_contents(self, value: Any, number: int) -> tuple[Any, ...]:
        kind = type(value)
        items = self._items_of(value, number) if issubclass(kind, tuple(_ITEMS)) else None
        attributes = [
            (name, self._encoded(held, number, (("attribute", name),))) for name, held in named_attributes_of(value)
        ]
        factory = self._key(value.default_factory, number) if issubclass(kind, defaultdict) else None
        return items, attributes, factory

    def _items_of(self, value: Any, number: int) -> list[Any]:
        is_dict = issubclass(type(value), dict)
        items = [*dict.items(value)] if is_dict else [*value]
        self._size += 16 * len(items)
        held = [*dict.keys(value), *dict.values(value)] if is_dict else items
        if are_scalars(map(type, held)):
            return items
        if not is_dict:
            return [self._encoded(item, number, (("number", i),)) for i, item in enumerate(items)]
        steps = (("item", key) if is_simple(key) else ("number", i) for i, (key, _) in enumerate(items))
        return [
            (self._key(key, number), self._encoded(item, number, (step,)))
            for (key, item), step in zip(items, steps, strict=True)
        ]

    def _key(self, value: Any, parent: int) -> Any:
        """Return what is pickled for a key of a dict, which has no place."""
        is_known = is_simple(value) or id(value) in self._numbers or self._is_named_code(value)
        return value if is_known else self._sent(value, parent, ())

    # --- what cannot be sent ---

    def _leave_out(self) -> None:
        """Leave out what cannot be pickled, and what is large."""
        # To read one back may run code of the program, which is for what is used.
        for sent, top, is_of_program in self._all_sent:
            is_used = not is_of_program or top in self._reached.named
            if package_of(type(sent.value)) in _IN_C:
                sent.leave_out("is memory of a library in C")
            elif not is_used and (_is_code(sent.value) or package_of(type(sent.value)) not in NOT_COMPARED):
                sent.leave_out("is not used")
        rest = [one for one in self._all_sent if not one[0].why]
        size = self._size_of([sent.value for sent, _, _ in rest if not is_cache(sent.value)])
        self._probe = None
        if not isinstance(size, Exception) and size <= LARGEST:
            rest = [one for one in rest if is_cache(one[0].value)]
        for sent, top, is_of_program in rest:
            value, is_required, words = sent.value, False, "keeps what it has returned"
            if is_cache(value):
                is_different = bool(is_of_program and value.cache_info().currsize)
            elif isinstance(size := self._size_of(value), Exception):
                is_different, is_required = True, is_of_program and callable(value)
                words = f"is a {type(value).__qualname__}, which cannot be pickled ({str(size).partition(chr(10))[0]})"
            else:
                is_different, words = size > LARGEST, _TOO_LARGE
            if is_different or is_cache(value):
                sent.leave_out(words, is_required)
                sent.name = self._name(sent.parent, sent.steps)
            if is_different and not is_required:
                self._note_not_compared(top, sent)

    def _size_of(self, value: Any) -> int | Exception:
        """Return how many bytes a value takes, or what pickling it raises."""
        probe = self._probe or _Probe(self.memo)
        try:
            self._probe, size = probe, probe.size_of(value)
        except Exception as error:  # what a user's __reduce__ may raise is anything
            self._probe = None  # it knows parts of what it could not pickle
            return error
        return size

    def _note_not_compared(self, top: tuple[str, str], sent: Sent) -> None:
        if top in self._reached.named:
            self.not_compared[self._name(sent.parent, sent.steps)] = sent.why

    def _name(self, parent: int, steps: tuple[tuple[str, Any], ...]) -> str:
        """Return a name such as ``project.settings.cfg['model']``."""
        before, steps_of_parent, made = self.places[parent]
        name = ".".join(made[1:3]) if before < 0 else self._name(before, steps_of_parent)
        return name + "".join(
            f".{key}" if step == "attribute" else f"[{key!r}]" if step in ("item", "number") else f" ({step} {key})"
            for step, key in steps
        )


class _Probe:
    """Pickles to nowhere.

    Parameters
    ----------
    memo : dict
        See `ModuleState.memo`.
    """

    def __init__(self, memo: Mapping[int, tuple[int, Any]]) -> None:
        self._size = 0
        self._pickler = FaithfulPickler(self, self._take)
        self._pickler.memo = memo

    def size_of(self, value: Any) -> int:
        """Return how many bytes a value takes; raise what pickling it raises."""
        self._size = 0
        self._pickler.dump(value)
        return self._size

    def write(self, data: Any) -> None:
        self._size += len(data)

    def _take(self, buffer: Any) -> bool:
        self._size += buffer.raw().nbytes
        return False


def _is_code(value: Any) -> bool:
    return is_cache(value) or issubclass(type(value), (type, FunctionType, BuiltinFunctionType, MethodType))


def _copied(function: FunctionType) -> FunctionType:
    """Return a function that is not found by its name, and so is sent by value."""
    parts = function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copied = FunctionType(*parts)
    copied.__kwdefaults__ = function.__kwdefaults__
    vars(copied).update(vars(function))
    return copied
