"""The call that every rank makes, written once by rank 0 and read by the worker processes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nano_loop.distributed.payload.culprit import find_culprit
from nano_loop.distributed.payload.faithful_pickler import FaithfulPickler
from nano_loop.distributed.payload.shared_files import SharedFiles, mapped_buffers
from nano_loop.errors import NanoError, problem


def dump(call: Any, folder: Path, names: Mapping[str, Any]) -> None:
    """Write `call` to ``folder/payload``, and its large storages and arrays to files beside it.

    Nothing of `call` is changed, and no large storage or contiguous array is copied in memory. After an error the
    folder may hold a part.

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
        with SharedFiles(folder) as files:
            FaithfulPickler(files, files.take).dump(call)
    except NanoError:
        raise
    except Exception as error:  # what a user's __reduce__ may raise is anything
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


def _refusal(call: Any, names: Mapping[str, Any], error: Exception) -> str:
    arguments = {f"argument `{name}`": value for name, value in names.items()}
    where = find_culprit({**arguments, "the call": call}) or f"the call cannot be pickled ({error!r})"
    allowed = "every argument is sent to the worker processes by cloudpickle"
    return problem(where, allowed, "Create it inside train, or leave it out of the call")
