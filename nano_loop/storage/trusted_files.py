"""Files and folders that no other user can change or replace.

A path that is checked and then opened again may have changed in between. So a folder is opened once, from the root
down, with each part of its path relative to the descriptor of the previous one, and checked by its descriptor. Its
files are opened relative to that, and checked by theirs. A path is stable if no other user can replace a part of it.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nano_loop.errors import NanoError, error_message

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PART = _FOLDER | getattr(os, "O_PATH", 0)  # it may not be readable
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe without a writer would block
_OTHERS = 0o077
_MOST_LINKS = 40  # as in Linux
_KINDS = {"folder": stat.S_ISDIR, "regular file": stat.S_ISREG}
_DESCRIPTORS = "/proc/self/fd"
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # errors that are not caused by a folder


def open_folder(path: str | Path, *, private: bool = False) -> int:
    """Return the descriptor of a folder of this user that nobody else can write to, read if `private`, or replace.

    Links are followed, except in the last part. Raises an `OSError` if it cannot be opened, and a `NanoError` if it is
    foreign.
    """
    parent, name = os.path.split(os.path.abspath(path))
    above = _open_part(parent)
    try:
        descriptor = os.open(name or ".", _FOLDER, dir_fd=above)
    except FileNotFoundError:
        raise
    except OSError as error:  # a link, a file or a pipe
        raise NanoError(_foreign(str(path), os.lstat(path), "folder", private)) from error
    finally:
        os.close(above)
    return _checked(descriptor, str(path), "folder", private)


def resolved(path: str | Path) -> Path:
    """Return the path of a folder with links resolved, all of which nobody else can replace; see `open_folder`."""
    descriptor, place = _walked(path)
    os.close(descriptor)
    return Path(place)


@contextmanager
def opened_folder(path: str | Path) -> Iterator[int]:
    """Yield the descriptor of a folder; see `open_folder`."""
    descriptor = open_folder(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(name: str, folder: int | None = None, flags: int = os.O_RDONLY, *, private: bool = False) -> int:
    """Return the descriptor of a regular file of this user that nobody else can write to, or read if `private`.

    `name` is a name in `folder`, or a path. Raises an `OSError` if it cannot be opened, and a `NanoError` if it is
    foreign.
    """
    try:
        descriptor = os.open(name, flags | _FILE, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        raise NanoError(_foreign(name, status, "regular file", private)) from error
    return _checked(descriptor, name, "regular file", private)


def read_file(name: str, folder: int, most: int) -> bytes:
    """Return the content of a file; see `open_file`. Raises an OSError for more than `most` bytes."""
    with open(open_file(name, folder), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"{name} has more than {most} bytes")
    return content


def write_file(name: str, folder: int, content: bytes) -> None:
    """Replace a file atomically, for concurrent readers and after a crash of the system."""
    unfinished = f"{name}.{os.getpid()}-{os.urandom(4).hex()}"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # the umask may have removed more
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished, dir_fd=folder)
        raise


def path_of(descriptor: int, path: str | Path) -> Path:
    """Return a path to a descriptor's open file, valid until it is closed; `path` if the system has no such paths."""
    return Path(_DESCRIPTORS, str(descriptor)) if os.path.isdir(_DESCRIPTORS) else Path(path)


def trusted_parent(parents: Iterable[Path | None]) -> Path:
    """Return the first folder in which this user can write and nobody else can replace its files, as in ``/tmp``.

    Raises a `NanoError` if there is none, and an `OSError` if this process cannot open any folder.
    """
    error: Exception | None = None
    for parent in filter(None, parents):
        try:
            os.close(_open_part(parent))
        except (OSError, NanoError) as refusal:
            if getattr(refusal, "errno", None) in _OF_THE_PROCESS:
                raise
            error = refusal
            continue
        if _is_allowed(parent, os.W_OK | os.X_OK):
            return parent
        error = PermissionError(f"{parent} cannot be written to")
    if isinstance(error, NanoError):
        raise error
    expected = "files of this process need a folder that it can write to"
    raise NanoError(error_message(str(error), expected, "Set TMPDIR to a folder of yours"))


def make_folder(prefix: str, parents: Iterable[Path | None]) -> Path:
    """Create a folder only for this user in the first suitable parent; raise an error if it is not safe or usable."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=trusted_parent(parents)))
    if not _is_allowed(folder, os.R_OK | os.W_OK | os.X_OK):
        mode = stat.filemode(folder.lstat().st_mode)
        folder.rmdir()
        got = f"a new folder has the mode {mode}, because of the umask"
        raise NanoError(error_message(got, "this user must be able to access new files", "Set umask 022"))
    folder.chmod(0o700)  # the umask may have removed more
    return folder


def _checked(descriptor: int, path: str, kind: str, private: bool) -> int:
    """Return a descriptor if its file is of this kind, belongs to this user, and is closed to others."""
    status = os.fstat(descriptor)
    is_open = status.st_mode & _OTHERS if private else _is_writable_by_others(status)
    if _KINDS[kind](status.st_mode) and status.st_uid == os.geteuid() and not is_open:
        return descriptor
    os.close(descriptor)
    raise NanoError(_foreign(path, status, kind, private))


def _open_part(path: str | Path) -> int:
    """Return a descriptor of a folder if nobody else can replace it or this user's files in it."""
    descriptor, place = _walked(path)
    try:
        _refuse_replaceable(place, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _walked(path: str | Path) -> tuple[int, str]:
    """Return a descriptor of a folder and its path with links resolved, none of which other users control."""
    place, descriptor = "/", os.open("/", _PART)
    parts, links = [*Path(os.path.abspath(path)).parts[1:]], 0
    try:
        while parts:
            _refuse_replaceable(place, os.fstat(descriptor))
            part = parts.pop(0)
            status = os.stat(part, dir_fd=descriptor, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                target = os.readlink(part, dir_fd=descriptor)
                if status.st_uid not in _administrators():
                    raise NanoError(_foreign(os.path.join(place, part), status, "folder", private=False))
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                parts[:0] = [name for name in target.split("/") if name not in ("", ".")]
                if not target.startswith("/"):
                    continue
                part = place = "/"
            above, descriptor = descriptor, os.open(part, _PART, dir_fd=descriptor)
            os.close(above)
            place = os.path.normpath(os.path.join(place, part))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, place


def _refuse_replaceable(path: str, status: os.stat_result) -> None:
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    if status.st_uid in _administrators() and (is_sticky or not _is_writable_by_others(status)):
        return
    got = f"files in {path} can be replaced by other users (user {status.st_uid}, {stat.filemode(status.st_mode)})"
    expected = f"nano_loop reads only files that nobody but user {os.geteuid()} can replace"
    hint = f"Set TMPDIR (or image_cache) to a folder of yours, or chmod +t {path}"
    raise NanoError(error_message(got, expected, hint))


def _is_allowed(folder: Path, mode: int) -> bool:
    return os.access(folder, mode, effective_ids=os.access in os.supports_effective_ids)


def _administrators() -> set[int]:
    """Return this user and root, who can replace everything. root may have another id in a user namespace."""
    users = {os.geteuid(), 0}
    with suppress(OSError):
        users.add(os.stat("/proc/sys").st_uid)
    return users


def _is_writable_by_others(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return True
    return bool(status.st_mode & stat.S_IWOTH)


def _is_own_group(group: int) -> bool:
    """Whether a group is the user's private group, which many systems create per user, with the user's name."""
    import grp  # imported here and below, since few folders need it, and it may query a server
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and entry.gr_name == user.pw_name and {*entry.gr_mem} <= {user.pw_name}


def _foreign(path: str, status: os.stat_result, kind: str, private: bool) -> str:
    got = f"{path} belongs to user {status.st_uid} and has the mode {stat.filemode(status.st_mode)}"
    expected = f"it must be a {kind} that only user {os.geteuid()} can {'open' if private else 'write to'}"
    return error_message(got, expected, "Start all processes as the same user, and close it to others (chmod go-rwx)")
