"""The call that every rank makes, written once by rank 0 and read by the worker processes."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from nano_loop.distributed.payload.faithful_pickler import FaithfulPickler
from nano_loop.distributed.payload.shared_files import SharedFiles, mapped_buffers
from nano_loop.distributed.payload.unpicklable import find_unpicklable
from nano_loop.errors import NanoError, error_message

_MAIN_OF_SPAWNED = "__mp_main__"  # in a child that multiprocessing has spawned


class Written(NamedTuple):
    """What `dump` has written.

    Attributes
    ----------
    copied : int
        The bytes of the large storages and arrays that were copied; what is shared memory already is not.
    modules : list of str
        The modules that `load` imports, in this order; but for those that others import.
    """

    copied: int
    modules: list[str]


def dump(call: Any, folder: Path, names: Mapping[str, Any]) -> Written:
    """Write `call` to ``folder/payload``, and its large storages and arrays to files beside it.

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

    Raises
    ------
    NanoError
        If something in `call` cannot be pickled, with the argument's name and the first steps down to it, or if the
        folder has no room.
    """
    try:
        with SharedFiles(folder) as files, _main_by_value():
            pickler = FaithfulPickler(files, files.take)
            pickler.dump(call)
            return Written(files.copied, [*pickler.modules])
    except NanoError:
        raise
    except Exception as error:  # what a user's __reduce__ may raise is anything
        with _main_by_value():
            raise NanoError(_refusal(call, names, error)) from error


def load(folder: Path) -> Any:
    """Read what `dump` has written.

    Large arrays and tensors share their memory with all other processes that have loaded them, as long as nobody
    writes; what one process writes is its own. Parameters, buffers of modules and optimizer state are read into
    ordinary memory. The folder is not needed afterwards, and no file stays open.

    Parameters
    ----------
    folder : Path
        The folder that was given to `dump`.
    """
    with (folder / "payload").open("rb") as file:
        return pickle.load(file, buffers=mapped_buffers(folder))


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
    return error_message(where, expected, "Create it inside train, or leave it out of the call")
