"""Commit a fault, and report the deviations from its row."""

import contextlib
import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from distributed.conftest import belongings
from leaks import affinity_masks, changes, moved_threads, process_state

from faults.fault import Fault
from faults.page import rows, told
from faults.runs import train
from nano_loop import NanoError, NanoWorkerError
from nano_loop.distributed.launch_local import server as servers

_SEEN = rows()
_PARTS = re.compile(r"(?s).+: .+\. .+[.?]")
_SOON = 30.0  # seconds until the process trains again, if it has to start another process to fork from
_STARTING = 30.0  # seconds for a Python process to import torch on a busy machine
_SLOW = "it took "
_DYING = 2.0  # seconds until a killed process is gone


def twice_if_slow(judge: Callable[[], list[str]]) -> list[str]:
    """Return the result of `judge`, repeated once if it was only slow: the machine may have been busy."""
    found = judge()
    return judge() if found and all(each.startswith(_SLOW) for each in found) else found


def verdict(fault: Fault) -> list[str]:
    """Commit `fault`, and return a sentence for each deviation from the row."""
    before = _state()
    gc.freeze()
    started = time.monotonic()
    found = [*_committed(fault)]
    took = time.monotonic() - started
    if took > fault.seconds + (_STARTING if fault.begins or fault.apart else 0):
        found.append(f"{_SLOW}{took:.1f} s")
    return [*found, *_left(before, fault), *_trains_again()]


def _committed(fault):
    try:
        fault.commit()
    except BaseException as error:
        seen = _seen(fault, error)
    else:
        seen = [] if _SEEN[fault.what] is None else [f"nothing was raised instead of {_SEEN[fault.what].error}"]
    gc.collect()  # its frames keep resources alive
    return seen


def _seen(fault, error):
    shown = "".join(traceback.format_exception(error))[-6000:]
    seen = _SEEN[fault.what]
    if seen is None or type(error).__name__ != seen.error:
        return [f"{type(error).__name__} was raised:\n{shown}"]
    message, found = str(error), []
    place = 0
    for part in seen.words:
        place = message.find(part, place)
        if place < 0:
            found.append(f"the message lacks {part!r}")
            break
    said = told(message) if isinstance(error, NanoWorkerError) else None
    if said is not None and (error.rank, error.exitcode) != (said.rank, said.exitcode):
        found.append(f"rank is {error.rank}, and exitcode is {error.exitcode}")
    if seen.rank is not None and getattr(error, "rank", None) != seen.rank:
        found.append(f"rank is {getattr(error, 'rank', None)}")
    if said is not None and said.raised and fault.travels and type(error.__cause__).__name__ != said.raised:
        found.append(f"its cause is {error.__cause__!r:.200}")
    if isinstance(error, NanoError) and not _PARTS.fullmatch(message.partition("\n\n")[0]):
        found.append("the message has not three parts")
    if isinstance(error, NanoWorkerError) and not isinstance(error.rank, int):
        found.append("no rank is named")
    return [f"{each} in:\n{shown}" for each in found]


def _trains_again():
    started = time.monotonic()
    try:
        steps = train()
    except BaseException as error:
        return ["it does not train again:\n" + "".join(traceback.format_exception(error))[-3000:]]
    took = time.monotonic() - started
    return [f"{_SLOW}{took:.1f} s to train again"] if took > _SOON else [] if steps == 2 else [f"trained {steps} steps"]


def _state():
    return {"process": process_state() | _settings(), "masks": affinity_masks(), "things": _things()}


def _left(before, fault):
    def left():
        return [f"left behind: {each}" for each in _new(before) if not each.startswith(fault.leaves or "-")]

    # A Python process that still imports torch finds out only later that it is not needed.
    deadline = time.monotonic() + _DYING + (_STARTING if fault.begins else 0)
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    return left()


def _new(before):
    after = _state()
    yield from changes(before["process"], after["process"])
    yield from moved_threads(before["masks"], after["masks"])
    for kind, things in after["things"].items():
        yield from (f"{kind} {things[key]}" for key in things.keys() - before["things"][kind].keys())


def _settings():
    handlers = {f"handler of {each.name}": signal.getsignal(each) for each in signal.Signals}
    with contextlib.suppress(FileNotFoundError):  # the row has deleted the folder
        handlers["working folder"] = os.getcwd()
    hooks = {"excepthook": sys.excepthook, "threads' excepthook": threading.excepthook, "trace": sys.gettrace()}
    if threading.current_thread() is threading.main_thread():
        hooks["wake-up descriptor"] = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(hooks["wake-up descriptor"])
    return handlers | hooks | {"gc": gc.isenabled(), "group": torch.distributed.is_initialized()}


def _things():
    folder = tempfile.gettempdir()
    temporary = [name for name in os.listdir(folder) if name.startswith(("nano_loop", "pymp-", "tmp", "torch_"))]
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    return belongings() | {"temporary": {name: name for name in temporary}, "thread": threads, "stray": _strays()}


def _strays():
    """Yield all processes with this process's temporary folder in their environment, whatever their parents are."""
    mark = f"TMPDIR={os.environ['TMPDIR']}\0".encode()
    known = {os.getpid(), *(server.pid for server in servers.kept)}
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            ours = process.pid not in known and mark in Path(f"/proc/{process.pid}/environ").read_bytes()
            if ours:
                found[process.pid] = f"{process.pid} {' '.join(process.cmdline())[:200]} {process.status()}"
    return found
