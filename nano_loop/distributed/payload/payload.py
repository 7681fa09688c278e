"""The call that every rank makes, written once by rank 0 and read by the worker processes."""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle

from nano_loop.distributed.payload.faithful_pickler import FaithfulPickler
from nano_loop.distributed.payload.module_state import ModuleState, StatePickler
from nano_loop.distributed.payload.places import take_state
from nano_loop.distributed.payload.reached_modules import ReachedModules
from nano_loop.distributed.payload.shared_files import SharedFiles, mapped_buffers
from nano_loop.distributed.payload.unpicklable import find_unpicklable
from nano_loop.errors import NanoError, NanoWarning, error_message

_MAIN_OF_SPAWNED = "__mp_main__"  # in a child that multiprocessing has spawned


def dump(call: Any, folder: Path, names: Mapping[str, Any]) -> int:
    """Write `call` and the data of the modules that it reaches to ``folder/payload``, and large storages beside it.

    Nothing of `call` is changed, and no large storage or contiguous array is copied in this process's memory. One that
    others can map where it is (a tensor after ``share_memory_()``, a mapped file) is not copied at all. After an error
    the folder may hold a part.

    Parameters
    ----------
    call : Any
        Any Python object.
    folder : Path
        An existing, empty folder in the shared-memory file system.
    names : mapping of str to Any
        The arguments of the user's call by name, for the message where one of them cannot be pickled.

    Returns
    -------
    int
        The bytes of the large storages and arrays that were copied; what is shared memory already is not.

    Raises
    ------
    NanoError
        If something in `call` cannot be pickled, with the argument's name and the first steps down to it, if the folder
        has no room, or if a worker would import other code.
    """
    try:
        with _main_by_value():
            reached = ReachedModules([call])
            reached.refuse_edited()
            state = ModuleState(reached)
            copied = _write(call, state, folder)
    except NanoError:
        raise
    except Exception as error:  # what a user's __reduce__ may raise is anything
        with _main_by_value():
            raise NanoError(_refusal(call, names, error)) from error
    if state.not_compared:
        got = "; ".join(f"{name} {why}" for name, why in state.not_compared.items())
        expected, hint = "worker processes have it as after a new import", "If they need more, set it in worker_init"
        warnings.warn(error_message(got, expected, hint), NanoWarning, stacklevel=2)
    return copied


def _write(call: Any, state: ModuleState, folder: Path) -> int:
    """Write what `load` reads, and return the bytes that were copied."""
    with SharedFiles(folder) as files:
        FaithfulPickler(files, files.take).dump(state.places)
        of_state, pickler = StatePickler(files, files.take), FaithfulPickler(files, files.take)
        of_state.memo = state.memo
        files.write(_memoizing(len(state.known)))
        of_state.dump(state.contents)
        pickler.memo = of_state.memo.copy()
        pickler.dump(call)
    return files.copied


def load(folder: Path) -> Any:
    """Read what `dump` has written. What differs in this process's modules is set first.

    Large arrays and tensors share their memory with all other processes that have loaded them, as long as nobody
    writes; what one process writes is its own. Parameters, buffers of modules and optimizer state are read into
    ordinary memory. The folder is not needed afterwards, and no file stays open.

    Parameters
    ----------
    folder : Path
        The folder that was given to `dump`.
    """
    with (folder / "payload").open("rb") as file:
        places = pickle.load(file)
        unpickler = _Unpickler(file, buffers=mapped_buffers(folder))
        take_state(places, unpickler.load_knowing)
        return unpickler.load()


class _Unpickler(pickle.Unpickler):
    """Knows objects beforehand, by their numbers in the memo."""

    def load_knowing(self, objects: Sequence[Any]) -> Any:
        """Read a pickle that may refer to objects by their numbers."""
        self._objects = objects
        self.load()  # what `_memoizing` has written
        return self.load()

    def persistent_load(self, number: Any) -> Any:
        """Return an object by its number."""
        return self._objects[number]


def _memoizing(count: int) -> bytes:
    """Return a pickle that puts so many objects of `persistent_load` into the memo: an unpickler's cannot be set."""
    puts = (pickle.BININT + number.to_bytes(4, "little") + pickle.BINPERSID for number in range(count))
    return b"".join(put + pickle.MEMOIZE + pickle.POP for put in puts) + pickle.NONE + pickle.STOP


@contextmanager
def _main_by_value() -> Iterator[None]:
    """Send what the program has defined as it is, also where multiprocessing has given `__main__` another name."""
    main = sys.modules.get(_MAIN_OF_SPAWNED)
    if main is None or _MAIN_OF_SPAWNED in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(main)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(main)


def _refusal(call: Any, names: Mapping[str, Any], error: Exception) -> str:
    arguments = {f"argument `{name}`": value for name, value in names.items()}
    where = find_unpicklable({**arguments, "the call": call}) or f"the call cannot be pickled ({error!r})"
    expected = "every argument is sent to the worker processes by cloudpickle"
    return error_message(where, expected, "Create it inside train, or omit it from the call")
