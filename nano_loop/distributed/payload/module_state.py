"""The program's data in the modules that a call reaches: read here, and set in a worker by `places`.

Each object that is updated in place (a dict, a list, a set, an instance) has a place: a module, and the path from it.
The picklers of both sides know these objects in advance, so that sent objects can refer to the worker's own ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from pickle import PickleBuffer
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from nano_loop.distributed.payload.code_reductions import is_found, is_sent
from nano_loop.distributed.payload.faithful_pickler import FaithfulPickler
from nano_loop.distributed.payload.places import (
    LOCKS,
    SCALARS,
    Contents,
    LeftOut,
    Place,
    are_scalars,
    contents_of,
    is_plain,
    new_of,
    parts_of,
    set_contents,
)
from nano_loop.distributed.payload.reached_modules import NOT_COMPARED, ReachedModules, is_cache, is_program, package_of
from nano_loop.patching.attributes import defined_in

#: Maximum size in bytes of a module attribute that is sent.
LARGEST = 64 * 2**20
_IN_C = ("ctypes", "_ctypes")  # handles and addresses, which are meaningless in another process
_NO_STATE = ((), ("__class__",))  # closure variables of methods
_TOO_LARGE = f"has over {LARGEST // 2**20} MB"
_IS_OWN = "is the worker's own"


class ModuleState:
    """The data of modules, to be reproduced in a worker."""

    def __init__(self, reached: ReachedModules) -> None:
        self.places: list[Place] = []  # those with data
        self.contents: list[Contents] = []  # in the order of the places, as the objects known to the picklers
        self.known: list[Any] = []
        #: The attributes that functions name but that are not sent, with the reason.
        self.not_compared: dict[str, str] = {}
        self._reached = reached
        self._placed_ids: set[int] = set()
        self._is_program = self._is_used = True  # for the attribute being read
        self._probe = _Probe()
        for module in sorted(reached.modules.values(), key=is_program, reverse=True):  # it may set library paths
            self._read_module(module)

    @property
    def memo(self) -> dict[int, tuple[int, Any]]:
        """The initial memo of a pickler."""
        return {id(value): (number, value) for number, value in enumerate(self.known)}

    # --- modules, classes, functions ---

    def _read_module(self, module: ModuleType) -> None:
        name = module.__name__
        values: dict[str, Any] = {}
        self._is_program = is_program(module)
        number = self._add_place(-1, (name, ""), ModuleType, (values, None))
        for attribute, value in vars(module).copy().items():
            if attribute.startswith("__") or issubclass(type(value), ModuleType):
                continue
            self._is_used = not self._is_program or (name, attribute) in self._reached.named
            if _is_defined(value, name, attribute):
                self._read_code(value)
            elif self._is_program or not _is_code(value):
                values[attribute] = self._part(value, number, attribute, f"{name}.{attribute}")

    def _read_code(self, code: type | FunctionType) -> None:
        """Read the data of a class or function of a module."""
        if isinstance(code, FunctionType):
            if self._is_program:
                self._read_function(code)
        elif not issubclass(code, Enum):
            values: dict[str, Any] = {}
            module, place = code.__module__, code.__qualname__
            number = self._add_place(-1, (module, place), type, (values, None))
            for name, value in defined_in(code).items():
                inner: Any = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                is_data = not hasattr(type(value), "__get__") or (self._is_program and isinstance(value, FunctionType))
                if _is_defined(inner, module, f"{place}.{name}"):
                    self._read_code(inner)
                elif is_data and not name.startswith(("__", "_abc_")):
                    values[name] = self._part(value, number, name, f"{module}.{place}.{name}")

    def _read_function(self, function: FunctionType) -> None:
        contents, has_cells = contents_of(function), function.__code__.co_freevars not in _NO_STATE
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if has_cells or vars(function) or not are_scalars(defaults):
            name = function.__module__, function.__qualname__
            if why := self._why_not(contents, "function"):
                self._note(".".join(name), why)
                return
            number = self._add_place(-1, name, function.__code__, contents)
            self._place(*((part, number, key) for key, part in parts_of(function, contents).items()))

    # --- values ---

    def _part(self, value: Any, parent: int, key: Any, name: str) -> Any:
        """Return the value to pickle for a part of an object, and assign places to its contents."""
        if type(value) in SCALARS or id(value) in self._placed_ids:
            return value
        if type(value) is FunctionType and is_sent(str(value.__globals__.get("__name__"))) and is_found(value):
            value = _copied(value)  # the script has replaced the module's code
        why = self._why_not(value, type(value).__qualname__)
        if not why:
            self._place((value, parent, key))
            return value
        if type(value) is dict and are_scalars(value) and why != _TOO_LARGE:  # send valid entries
            items: list[tuple[Any, Any]] = []
            number = self._add_place(parent, key, dict, ({}, items), value)
            items += [(part, self._part(item, number, (part,), f"{name}[{part!r}]")) for part, item in value.items()]
            return value
        is_required = self._is_program and self._is_used and callable(value) and not is_cache(value)
        if not is_required:
            self._note(name, why)
        return LeftOut(f"{name} {why}", is_required)

    def _why_not(self, value: Any, kind: str) -> str:
        """Return the reason why a value of this kind is not sent, or an empty string if it is sent."""
        if is_cache(value) and value.cache_info().currsize:
            return "caches its results"
        try:
            size = self._probe.size_of(value, may_run_code=self._is_used)
        except _OwnError:
            return _IS_OWN
        except Exception as error:  # a user's __reduce__ may raise anything
            words = str(error).partition("\n")[0]
            return f"is a {kind}, which cannot be pickled ({words})"
        return _TOO_LARGE if size > LARGEST else ""

    def _note(self, name: str, why: str) -> None:
        if self._is_used and why != _IS_OWN:
            self.not_compared[name] = why

    def _place(self, *parts: tuple[Any, int, Any]) -> None:
        """Assign places to objects, given their holder's number and key, and to their parts."""
        queue = deque(parts)
        while queue:
            value, parent, key = queue.popleft()
            kind = type(value)
            if kind not in SCALARS and id(value) not in self._placed_ids and self._probe.pickler.takes_apart(kind):
                contents = contents_of(value)
                number = self._add_place(parent, key, LOCKS.get(kind, kind), contents, value)
                queue.extend((part, number, key) for key, part in parts_of(value, contents).items())

    def _add_place(self, parent: int, key: Any, kind: Any, contents: Contents, value: Any = None) -> int:
        self.places.append((parent, key, kind))
        self.contents.append(contents)
        if parent >= 0:
            self.known.append(value)
            self._placed_ids.add(id(value))
        return len(self.places) - 1


class StatePickler(FaithfulPickler):
    """Pickles the contents of modules: recreates locks, and pickles plain instances by their contents."""

    #: Whether to call pickling methods of the program's and libraries' classes: only for objects that are used.
    may_run_code = True

    def __init__(self, file: Any, take: Callable[[PickleBuffer], bool]) -> None:
        super().__init__(file, take)
        self._taken_apart: dict[type, bool] = {}

    def takes_apart(self, kind: type) -> bool:
        """Whether instances are plain, and of a class that the other process can import."""
        if kind not in self._taken_apart:
            self._taken_apart[kind] = kind in LOCKS or (is_plain(kind) and is_found(kind))
        return self._taken_apart[kind]

    def reducer_override(self, value: Any) -> Any:
        """See `FaithfulPickler.reducer_override`."""
        kind = type(value)
        if kind in LOCKS:
            return LOCKS[kind], ()
        package = package_of(kind)
        if package in _IN_C:
            raise _OwnError
        if not _is_code(value) and self.place_of(value) is None:
            if self.takes_apart(kind):
                return new_of, (kind,), contents_of(value), None, None, set_contents
            if not self.may_run_code and package not in NOT_COMPARED:
                raise _OwnError
        return super().reducer_override(value)


class _OwnError(Exception):
    """The worker keeps its own object."""


class _Probe:
    """Pickles without storing the output, to check and measure values."""

    def __init__(self) -> None:
        self._size = 0
        self.pickler = StatePickler(self, self._take)

    def size_of(self, value: Any, *, may_run_code: bool) -> int:
        """Return the additional size of a value in bytes; propagates errors from pickling."""
        self._size, self.pickler.may_run_code = 0, may_run_code
        with ExitStack() as failed:
            failed.callback(self.pickler.clear_memo)  # discard parts of values that cannot be pickled
            self.pickler.dump(value)
            failed.pop_all()
        return self._size

    def write(self, data: Any) -> None:
        self._size += len(data)

    def _take(self, buffer: PickleBuffer) -> bool:
        self._size += buffer.raw().nbytes
        return False


def _is_code(value: Any) -> bool:
    return is_cache(value) or issubclass(type(value), (type, FunctionType, BuiltinFunctionType, MethodType))


def _is_defined(value: Any, module: str, qualified: str) -> bool:
    """Whether a class or function is the one that a module defines there, and has not been replaced."""
    if not isinstance(value, (type, FunctionType)) or (value.__module__, value.__qualname__) != (module, qualified):
        return False
    return is_found(value) and (isinstance(value, type) or value.__globals__.get("__name__") == module)


def _copied(function: FunctionType) -> FunctionType:
    """Return a copy of a function that cannot be found by name, so that it is sent by value."""
    parts = function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    copied = FunctionType(*parts)
    copied.__kwdefaults__ = function.__kwdefaults__
    vars(copied).update(vars(function))
    return copied
