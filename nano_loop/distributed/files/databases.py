"""How a worker opens a SQLite database: its own copy of it, since SQLite opens files by their paths."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from nano_loop.distributed.files.changes import PRIVATE
from nano_loop.distributed.files.copies import own, own_folder
from nano_loop.distributed.files.overlay import Overlay


@contextlib.contextmanager
def opened_database(overlay: Overlay, database: Any, uri: bool, connect: Callable[..., Any]) -> Iterator[Any]:
    """Give what is to be connected to instead of a database.

    Parameters
    ----------
    overlay : Overlay
        The files of this worker.
    database, uri : str, bool
        The arguments of `sqlite3.connect`.
    connect : callable
        The original.
    """
    name = os.fsdecode(database)
    is_uri = uri and name.startswith("file:")
    path = unquote(urlsplit(name).path) if is_uri else name
    query = parse_qs(urlsplit(name).query) if is_uri else {}
    overlay.refresh()
    if path in ("", ":memory:") or "memory" in query.get("mode", ()) or overlay.is_shared(overlay.key(path)):
        yield database
        return
    reads = "ro" in query.get("mode", ()) or "immutable" in query
    place = overlay.reading(path) if reads else _own_database(overlay, overlay.key(path), connect)
    yield f"file:{quote(place)}?{urlsplit(name).query}" if is_uri else place


def _own_database(overlay: Overlay, key: str, connect: Callable[..., Any]) -> str:
    with overlay.lock:
        if overlay.changes.get(key) == PRIVATE or (seen := overlay.seen(key)) is None:
            folder = own_folder(overlay, os.path.dirname(key))
            overlay.changes.set(key, PRIVATE)
            return os.path.join(folder, os.path.basename(key))
        if not seen.st_size:
            return own(overlay, key)
        place = os.path.join(own_folder(overlay, os.path.dirname(key)), os.path.basename(key))
        # SQLite's own way to copy what another process may be writing.
        with (
            contextlib.closing(connect(f"file:{quote(key)}?mode=ro", uri=True)) as source,
            contextlib.closing(connect(place)) as copy,
        ):
            source.backup(copy)
        overlay.changes.set(key, PRIVATE)
        return place
