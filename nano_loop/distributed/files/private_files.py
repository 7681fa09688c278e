"""The switch of a process to private files: it puts the functions that ask a table in place of Python's, and back."""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import FunctionType
from typing import Any

from nano_loop.distributed.files.caches import cache_folders
from nano_loop.distributed.files.explained import explaining_files, refuse_unseen_changes
from nano_loop.distributed.files.folder import began, discard, folders_of, place_of
from nano_loop.distributed.files.functions import Functions
from nano_loop.distributed.files.landlock import keep_writes_in
from nano_loop.distributed.files.made_folders import MadeFolders
from nano_loop.distributed.files.native import natives_by_module, replacements_in
from nano_loop.distributed.files.originals import real
from nano_loop.distributed.files.replacements import Replacement
from nano_loop.distributed.files.table import Table
from nano_loop.patching.when_imported import WhenImported

# Modules that keep such functions in classes, in default arguments, or in dicts of objects.
_KEEPING = ("glob", "numpy.lib._datasource", "pathlib", "shutil", "tempfile")
_OURS = __name__.rpartition(".")[0]
_OF_MULTIPROCESSING = "pymp-"  # what the names of its folders begin with: they hold sockets, and last
_sanitize = "_sanitize_params"  # where tempfile decides on the folder; it has no public place
_Replaced = Mapping[int, tuple[Any, Any]]  # what is replaced by what, by the ids of the former

_table = Table()
_forever = ExitStack()  # never left: what `prepare` replaces ends with the process


@functools.cache
def prepare() -> None:
    """Replace the functions in this process and those that it forks; until `redirect_files` they do what they did.

    It takes 10 ms in a forked process, which copies each page of memory that it writes to. So the process that workers
    are forked from does it once.
    """
    _replace_functions(_table, _forever)


def redirect_files(run: Path, rank: int, made: Path | None = None) -> None:
    """Let this process, a worker that ends with the run, keep what it writes private.

    Parameters
    ----------
    run : pathlib.Path
        The private folder of the run, in which `nano_loop.distributed.files.folder.workers_files` has left a link.
    rank : int
        The rank of this process. Rank 0 is that of a trial, beside the caller's process.
    made : pathlib.Path, optional
        Where the ranks of this host tell rank 0 which folders they have made. By default it is `run`.
    """
    prepare()
    place = f"{place_of(run)}/{rank}"
    real.mkdir(place, 0o700)
    _begin(place, f"{place}/temporary", made or run, run, began(run))
    _table.is_rank_0 = rank == 0


def guard_files() -> None:
    """Let the kernel refuse to this thread, and to what it starts, to change the caller's files past the table.

    Not to the rank 0 of a trial, where compiled code may write.
    """
    if _table.is_rank_0:
        return
    for folder in cache_folders():  # the kernel can only be told of folders that exist
        _table.made.make_for_the_run(folder)
    outside = ThreadPoolExecutor(1)
    outside.submit(os.getpid).result()  # it is there before the boundary is drawn around this thread
    if keep_writes_in(_table.shared):
        _table.outside = outside
        tempfile.gettempdir()  # which is kept: the caller's files there are found by it
        os.environ["TMPDIR"] = _table.temporary  # programs such as a compiler may write nowhere else
        os.register_at_fork(after_in_child=lambda: setattr(_table, "outside", None))


@contextlib.contextmanager
def private_files(run: Path, own: Path, since: int) -> Iterator[None]:
    """Keep what this process, a rank other than 0 that somebody else has started, writes in the body private.

    Parameters
    ----------
    run : pathlib.Path
        A private folder that the ranks of this host have in common.
    own : pathlib.Path
        The private folder of this process, in which `nano_loop.distributed.files.folder.workers_files` has left a link.
        Temporary files go there, and stay after the run.
    since : int
        When the run began, in ns: what has changed later, rank 0 has changed.
    """
    with ExitStack() as stack:
        place = tempfile.mkdtemp(dir=place_of(own))
        stack.callback(discard, place)
        _replace_functions(_table, stack)
        stack.callback(_table.end)
        stack.callback(_begin(place, f"{place_of(own)}/temporary", run, own, since))
        stack.enter_context(explaining())
        yield


def explaining() -> AbstractContextManager[None]:
    """Let the errors of a rank say which disk is full, and which file compiled code could not open."""
    return explaining_files(_table)


@contextlib.contextmanager
def folders_made_together(run: Path) -> Iterator[None]:
    """Let rank 0 make a folder that another rank has made before it in this run: all of them run the same loop.

    Parameters
    ----------
    run : pathlib.Path
        A private folder that the ranks of this host have in common.
    """
    original, made = os.mkdir, MadeFolders(run)

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        try:
            original(path, mode, dir_fd=dir_fd)
        except FileExistsError:
            if dir_fd is not None or not made.claim(path):
                raise

    os.mkdir = Replacement(mkdir, original, "os")
    try:
        yield
    finally:
        os.mkdir = original
        made.clean()


def _begin(place: str, temporary: str, run: Path, own: Path, since: int) -> Callable[[], None]:
    with contextlib.suppress(FileExistsError):
        real.mkdir(temporary, 0o700)
    _table.begin(place, temporary, run, since, (*folders_of(own), os.path.realpath(run), *cache_folders()))
    return _keep_temporary_files_in(temporary)


def _replace_functions(table: Table, undo: ExitStack) -> None:
    """Replace Python's functions and compiled ones, also those of modules that are imported later, until `undo`."""
    replaced: list[tuple[Any, str, Any, Any]] = []
    waiting = natives_by_module()

    def add(module: Any, natives: Any) -> None:
        for replacement in replacements_in(table, module, natives):
            replaced.append(replacement)
            setattr(replacement[0], replacement[1], replacement[3])

    finder = WhenImported(waiting, add)
    replaced.extend(_of_python(table))
    for name in [name for name in waiting if name in sys.modules]:
        replaced.extend(replacements_in(table, sys.modules[name], waiting.pop(name)))
    undo.callback(lambda: _swap([(owner, name, new, old) for owner, name, old, new in replaced]))
    _swap(replaced)
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)
    refuse_unseen_changes(table)


def _of_python(table: Table) -> Iterator[tuple[Any, str, Any, Any]]:
    functions = Functions(table)
    for name, function in functions.of_os().items():
        yield os, name, getattr(real, name), Replacement(function, getattr(real, name), "os")
    opening, kind = Replacement(functions.of_io(), real.open_file, "io"), functions.file_io()
    yield from ((owner, "open", real.open_file, opening) for owner in (builtins, io))
    yield io, "FileIO", real.FileIO, kind
    yield shutil, "rmtree", shutil.rmtree, Replacement(functions.removing_tree(), shutil.rmtree, "shutil")


def _swap(pairs: Iterable[tuple[Any, str, Any, Any]]) -> None:
    """Set the new in place of the old where they belong, and wherever modules have imported the old by name."""
    replaced = {id(old): (old, new) for _, _, old, new in pairs}
    for owner, name, old, new in pairs:
        setattr(owner, name, new)
        for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if owner is os and old in supporting:
                supporting.add(new)
                if isinstance(old, Replacement):
                    supporting.remove(old)
    for module in [*sys.modules.values()]:
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and not str(names.get("__name__")).startswith(_OURS):
            _replace_values(names, replaced)
    for name in _KEEPING:
        if name in sys.modules:
            _replace_where_kept(sys.modules[name], replaced)


def _replace_values(names: dict[Any, Any], replaced: _Replaced) -> None:
    for name in [name for name, value in [*names.items()] if id(value) in replaced]:
        names[name] = replaced[id(names[name])][1]


def _replace_where_kept(module: Any, replaced: _Replaced) -> None:
    """Replace what the classes, functions and objects of a module keep."""
    values = [*vars(module).values()]
    for value in values:
        if type(value).__module__ == module.__name__:
            for kept in vars(value).values():
                if isinstance(kept, dict):
                    _replace_values(kept, replaced)
    classes = [value for value in values if isinstance(value, type) and value.__module__ == module.__name__]
    for owner in (module, *classes):
        for name, value in [*vars(owner).items()]:
            kept = value.__func__ if isinstance(value, staticmethod) and id(value) not in replaced else value
            if id(kept) in replaced:
                setattr(owner, name, replaced[id(kept)][1])
            elif isinstance(kept, FunctionType) and kept.__defaults__:
                kept.__defaults__ = tuple(replaced.get(id(value), (0, value))[1] for value in kept.__defaults__)


def _keep_temporary_files_in(folder: str) -> Callable[[], None]:
    """Let `tempfile` make files in a folder where the caller names none; return what undoes it.

    They are real files, for other programs too. `tempfile.gettempdir()` stays, where the caller may have put something.
    """
    original = getattr(tempfile, _sanitize, None)
    if original is None:
        return lambda: None

    def sanitized(prefix: Any, suffix: Any, dir: Any) -> Any:
        prefix, suffix, chosen, kind = original(prefix, suffix, dir)
        if dir is None and prefix != _OF_MULTIPROCESSING:
            chosen = os.fsencode(folder) if kind is bytes else folder
        return prefix, suffix, chosen, kind

    setattr(tempfile, _sanitize, sanitized)
    return lambda: setattr(tempfile, _sanitize, original)
