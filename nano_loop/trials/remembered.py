"""Keeps what searches have found, in a file for each model, batch and machine: a second search costs nothing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from nano_loop.cache_folder import cache_folder
from nano_loop.run import RunTask
from nano_loop.settings import Settings
from nano_loop.trials.description import key_of
from nano_loop.trials.search import SECONDS, Search
from nano_loop.trials.tuning import Tuning

_FORMAT = 1
_MOST_BYTES = 1 << 24


def found_before_or_now(
    task: RunTask, settings: Settings, fixed: Collection[str], seconds: float = SECONDS, again: bool = False
) -> Tuning:
    """Return what an earlier search has found for such a task, or search.

    Parameters
    ----------
    task : RunTask
        The user's loop.
    settings : Settings
        The options that the search begins with.
    fixed : collection of str
        The options that stay as they are.
    seconds : float
        How long a search may take, about.
    again : bool
        Whether to search also if there was a search before.
    """
    key = key_of(task, settings, fixed)
    folder = cache_folder()
    path = None if folder is None or key is None else folder / f"options-{key}.json"
    found = None if again else _read(path)
    if found is None:
        found = Search(task, settings, fixed, seconds).run()
        _write(path, found)
    return found


def _read(path: Path | None) -> Tuning | None:
    try:
        if path is None or path.stat().st_size > _MOST_BYTES:
            return None
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            return None
        return Tuning.of_dict({**content["tuning"], "cached": True})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write(path: Path | None, found: Tuning) -> None:
    """Write the file and move it into place at once, for processes that read it meanwhile."""
    if path is None:
        return
    with suppress(OSError, TypeError), tempfile.TemporaryDirectory(prefix="making-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        made.write_text(json.dumps({"format": _FORMAT, "tuning": found.as_dict()}))
        made.replace(path)
