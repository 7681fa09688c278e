"""The call that every rank makes, written once by rank 0 and read by the workers."""

from __future__ import annotations

import inspect
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import cloudpickle

from nano_loop.distributed.payload.faithful_pickler import FaithfulPickler
from nano_loop.distributed.payload.module_state import ModuleState, StatePickler
from nano_loop.distributed.payload.places import take_state
from nano_loop.distributed.payload.reached_modules import ReachedModules
from nano_loop.distributed.payload.shared_files import SharedFiles, mapped_buffers
from nano_loop.errors import NanoError, NanoWarning, error_message

_MAIN_OF_SPAWNED = "__mp_main__"  # in a child spawned by multiprocessing


def dump(call: Any, folder: Path, names: Mapping[str, Any]) -> int:
    """Write `call` and the data of the modules that it reaches to ``folder/payload``, and large storages next to it.

    No large storage or contiguous array is copied within this process's memory. `names` are the arguments of the user's
    call, for errors about objects that cannot be pickled. Returns the bytes of large storages and arrays that were
    copied.
    """
    _send_main()
    try:
        reached = ReachedModules([call])
        reached.refuse_edited()
        state = ModuleState(reached)
        copied = _write(call, state, folder)
    except NanoError:
        raise
    except Exception as error:  # a user's __reduce__ may raise anything
        raise NanoError(_refusal(call, names, error)) from error
    if state.not_compared:
        got = "; ".join(f"{name} {why}" for name, why in state.not_compared.items())
        expected, hint = "workers have its value after a new import", "If they need another one, set it in worker_init"
        warnings.warn(error_message(got, expected, hint), NanoWarning, stacklevel=2)
    return copied


def _write(call: Any, state: ModuleState, folder: Path) -> int:
    """Write the files that `load` reads, and return the number of bytes copied."""
    with closing(SharedFiles(folder)) as files:
        FaithfulPickler(files, files.take).dump(state.places)
        of_state, pickler = StatePickler(files, files.take), FaithfulPickler(files, files.take)
        of_state.memo = state.memo
        files.write(_memoizing(len(state.known)))
        of_state.dump(state.contents)
        pickler.memo = of_state.memo.copy()
        pickler.dump(call)
    return files.copied


def load(folder: Path) -> Any:
    """Read the files that `dump` has written to a folder, after updating differing data in this process's modules.

    Large arrays and tensors share their memory copy-on-write with other processes; what training changes is read into
    ordinary memory. Afterwards, the folder is not needed.
    """
    with (folder / "payload").open("rb") as file:
        places = pickle.load(file)
        unpickler = _Unpickler(file, buffers=mapped_buffers(folder))
        take_state(places, unpickler.load_knowing)
        return unpickler.load()


class _Unpickler(pickle.Unpickler):
    """Knows some objects in advance, by their numbers in the memo."""

    def load_knowing(self, objects: Sequence[Any]) -> Any:
        """Read a pickle that may refer to these objects by number."""
        self._objects = objects
        self.load()  # reads the output of `_memoizing`
        return self.load()

    def persistent_load(self, number: Any) -> Any:
        """Return an object by its number."""
        return self._objects[number]


def _memoizing(count: int) -> bytes:
    """Return a pickle that puts this many objects into the memo by `persistent_load`; it cannot be set directly."""
    puts = (pickle.BININT + number.to_bytes(4, "little") + pickle.BINPERSID for number in range(count))
    return b"".join(put + pickle.MEMOIZE + pickle.POP for put in puts) + pickle.NONE + pickle.STOP


def _send_main() -> None:
    """Send the program's definitions by value, even if multiprocessing has renamed `__main__`."""
    if _MAIN_OF_SPAWNED in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules[_MAIN_OF_SPAWNED])


def _refusal(call: Any, names: Mapping[str, Any], error: Exception) -> str:
    arguments = {f"argument `{name}`": value for name, value in names.items()}
    where = find_unpicklable({**arguments, "the call": call}) or f"the call cannot be pickled ({error!r})"
    expected = "every argument is sent to the worker processes by cloudpickle"
    return error_message(where, expected, "Create it inside train, or omit it from the call")


# # --- finding the argument that cannot be pickled, and the first steps down to the object at fault ---

_STEPS = 3  # such as: its attribute `_modules`, its item 'encoder', its attribute `cache`
_OF_CALLABLES = ("__self__", "__defaults__", "__kwdefaults__", "func", "args", "keywords")


def find_unpicklable(named: Mapping[str, Any]) -> str | None:
    """Return a sentence, beginning with the name, about the first of the `named` objects that cannot be pickled."""
    for name, value in named.items():
        error = _failure(value)
        if error is not None:
            return _sentence(name, value, error)
    return None


def _failure(value: Any) -> Exception | None:
    """Return the error from pickling only `value`."""
    try:
        FaithfulPickler(SimpleNamespace(write=len), lambda buffer: False).dump(value)
    except Exception as error:  # a user's __reduce__ may raise anything
        return error
    return None


def _sentence(name: str, value: Any, error: Exception) -> str:
    path = [name]
    for _ in range(_STEPS):
        causes = ((step, part, _failure(part)) for step, part in _parts(value))
        step, part, cause = next((cause for cause in causes if cause[2] is not None), (None, None, None))
        if step is None or cause is None:
            break
        path, value, error = [*path, step], part, cause
    comma = "," if len(path) > 1 else ""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    words = str(error).partition("\n")[0]
    return f"{', '.join(path)}{comma} is a {kind} and cannot be pickled ({type(error).__name__}: {words})"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of `value`, each with a description of its place."""
    if isinstance(value, dict):
        yield from ((f"its item {key!r}", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"its item {number}", item) for number, item in enumerate(value))
    elif isinstance(value, FunctionType):
        with suppress(ValueError):  # a closure variable is not assigned yet
            inside = inspect.getclosurevars(value)
            yield from ((f"its closure variable `{name}`", part) for name, part in inside.nonlocals.items())
            yield from ((f"its global variable `{name}`", part) for name, part in inside.globals.items())
    attributes = {name: getattr(value, name, None) for name in _OF_CALLABLES} if callable(value) else {}
    yield from ((f"its attribute `{name}`", part) for name, part in {**_state(value), **attributes}.items())


def _state(value: Any) -> dict[str, Any]:
    """Return the attributes of `value` that are pickled."""
    try:
        state = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)
    except Exception:  # user code may raise anything
        return {}
    return state if isinstance(state, dict) else {}
