"""Finds the current line of the user's code, skipping frames of torch, Fabric and nano_loop, and warns about it."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import FrameSummary
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from nano_loop.errors import NanoWarning

_PACKAGES = Path(str(torch.__file__)).parents[1]
_PACKAGE = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_path("stdlib")
#: Packages that nano_loop calls for its own purposes.
_CALLED = tuple(str(_PACKAGES / name) for name in ("numpy", "psutil", "cloudpickle"))
_MODULES = str(_PACKAGES / "torch" / "nn" / "modules")
_NOT_THE_USERS = (
    *(str(_PACKAGES / name) for name in ("torch", "lightning_fabric", "lightning_utilities")),
    _PACKAGE,
    str(contextlib.__file__),  # appears between two nano_loop frames
)


def is_users(filename: str) -> bool:
    """Whether a file contains code of the user."""
    return not filename.startswith(_NOT_THE_USERS)


def users_frame(frames: Sequence[FrameSummary]) -> FrameSummary | None:
    """Return the innermost frame of the user's code among `frames` (outermost first), or None."""
    return next((frame for frame in reversed(frames) if is_users(frame.filename)), None)


def users_traceback(traceback: TracebackType | None, *, keeps_last: bool = True) -> TracebackType | None:
    """Return a traceback without the nano_loop frames that lead to the user's code or to a module.

    Frames below the last such frame are kept, to show where nano_loop or its callee raised. If `keeps_last` is False,
    they are removed as well, which suits errors that describe what the user should change.
    """
    entries: list[TracebackType] = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    files = [entry.tb_frame.f_code.co_filename for entry in entries]
    last = max((place for place, file in enumerate(files) if _is_led_to(file)), default=-1)
    kept = None
    for place, entry in reversed([*enumerate(entries)]):
        if (place > last and keeps_last) or not _is_between(files, place):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def trim_tracebacks(error: BaseException, *, keeps_last: bool = True) -> None:
    """Remove such nano_loop frames from the tracebacks of an error and of the errors that caused it."""
    error.__traceback__ = users_traceback(error.__traceback__, keeps_last=keeps_last)
    seen, before = {id(error)}, error.__cause__ or error.__context__
    while before is not None and id(before) not in seen:
        seen.add(id(before))
        before.__traceback__ = users_traceback(before.__traceback__)
        before = before.__cause__ or before.__context__


def _is_led_to(file: str) -> bool:
    """Whether nano_loop calls a file on the user's behalf, and not for itself like the standard library."""
    if file.startswith(_MODULES):
        return True
    of_library = file.startswith((_STANDARD, "<frozen")) and _PACKAGES.name not in Path(file).parts
    return is_users(file) and not of_library and not file.startswith(_CALLED)


def _is_between(files: Sequence[str], place: int) -> bool:
    """Whether a file belongs to nano_loop, or is contextlib next to a nano_loop frame."""
    if files[place] != contextlib.__file__:
        return files[place].startswith(_PACKAGE)
    around: tuple[Iterable[str], ...] = (reversed(files[:place]), files[place + 1 :])
    nearest = (next((file for file in part if file != contextlib.__file__), "") for part in around)
    return any(file.startswith(_PACKAGE) for file in nearest)


def users_line() -> str:
    """Return the running source line of the user's code in the format of a traceback, or an empty string."""
    frame = users_frame(traceback.extract_stack())
    return "" if frame is None else "".join(traceback.format_list([frame])).rstrip()


class Place(NamedTuple):
    """A line of the user's code."""

    filename: str
    number: int
    names: dict[str, Any]


def users_place() -> Place | None:
    """Return the place in the user's code that is running in this thread, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


def warn(message: str) -> None:
    """Issue a `NanoWarning` at the current line of the user's code."""
    place = users_place()
    if place is None:
        warnings.warn(message, NanoWarning, stacklevel=2)
    else:
        registry = place.names.setdefault("__warningregistry__", {})  # like `warnings.warn`
        module = str(place.names.get("__name__"))
        warnings.warn_explicit(message, NanoWarning, place.filename, place.number, module, registry)


_warned: set[tuple[str, int, str]] = set()


def warn_once(message: str) -> None:
    """Issue a `NanoWarning` at the current line of the user's code, once per process.

    Python's own record is not enough: a run changes the warning filters, which invalidates it, and a function called
    once per epoch would warn each time.
    """
    place = users_place()
    line = (place.filename, place.number, message) if place else ("", 0, message)
    if line not in _warned:
        _warned.add(line)
        warn(message)
