"""A file of the algorithms that were measured to be the fastest, so that later runs on this machine start tuned."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nano_loop.config.environment import KERNELS
from nano_loop.cpu import Machine
from nano_loop.kernels.compiler import sources_digest
from nano_loop.storage.cache_folder import JsonFile, cache_folder, cache_path
from nano_loop.version import __version__

#: The version of the file and of the algorithms: a choice among fewer algorithms is not used.
_FORMAT = 6


class Choice(NamedTuple):
    """The fastest algorithm for one key, the default one, and the shortest times of those that were measured."""

    algorithm: str
    guess: str
    milliseconds: Mapping[str, float]

    @property
    def gain(self) -> float:
        """Milliseconds saved per call compared to the default; 0 if noise from other programs hid the gain."""
        times = self.milliseconds
        is_known = {self.guess, self.algorithm} <= times.keys()
        return max(times[self.guess] - times[self.algorithm], 0.0) if is_known else 0.0


class Choices:
    """Choices by key, read from a file unless `path` is None; a damaged one counts as empty."""

    def __init__(self, path: Path | None) -> None:
        self._file = JsonFile(path, _FORMAT)
        self._lock = threading.Lock()
        self._choices = _read(self._file)
        self._new: dict[str, Choice] = {}
        self._unsure: set[str] = set()

    def __len__(self) -> int:
        return len(self._choices)

    def get(self, key: str) -> Choice | None:
        """Return the choice for a key, or None."""
        return self._choices.get(key)

    def put(self, key: str, choice: Choice) -> None:
        """Record a choice, for `save`."""
        with self._lock:
            self._choices[key] = self._new[key] = choice

    def take_over(self, others: Mapping[str, Choice]) -> None:
        """Add choices of another process, which saves them itself."""
        with self._lock:
            self._choices.update(others)

    def all(self) -> dict[str, Choice]:
        """Return all choices by key."""
        with self._lock:
            return dict(self._choices)

    def save(self, is_busy: bool = False) -> None:
        """Add the new choices to the file, if possible and unless other programs used the CPUs (`is_busy`)."""
        with self._lock:
            new, self._new = self._new, {}
            if is_busy:
                self._unsure |= new.keys()
        if new and not is_busy:
            self._file.write({"choices": _read(self._file) | new})

    def forget_unsure(self) -> None:
        """Discard results measured on a busy machine, so that they are measured again."""
        with self._lock:
            for key in self._unsure:
                self._choices.pop(key, None)
            self._unsure.clear()


_opened: dict[tuple[Path | None, str], Choices] = {}  # by folder and file name


def choices_for(machine: Machine, threads: int | None = None) -> Choices:
    """Return the process's choices for this processor, these versions, and torch's threads; 0 for any number."""
    name = f"operators-{_key(machine, torch.get_num_threads() if threads is None else threads)}.json"
    place = cache_path(), name
    if place not in _opened:
        folder = cache_folder()
        _opened[place] = Choices(None if folder is None else folder / name)
    choices = _opened[place]
    choices.forget_unsure()
    return choices


def save_all(is_busy: bool = False) -> None:
    """Save the unsaved choices of this process; see `Choices.save`."""
    for choices in [*_opened.values()]:
        choices.save(is_busy)


def _key(machine: Machine, threads: int) -> str:
    environment = [f"{name}={os.environ.get(name, '')}" for name in _CHANGE_KERNELS]
    capability = torch.backends.cpu.get_cpu_capability()
    versions = [torch.__version__, __version__, sources_digest()]
    parts = [machine.name, *sorted(machine.instruction_sets), capability, *versions, *environment]
    return hashlib.sha256("\0".join([*parts, str(threads)]).encode()).hexdigest()[:16]


#: Environment variables that make torch, oneDNN and nano_loop use other kernels.
_CHANGE_KERNELS = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    KERNELS,
)


def _read(file: JsonFile) -> dict[str, Choice]:
    choices = file.read().get("choices")
    entries = choices.items() if isinstance(choices, dict) else ()
    return {key: Choice(*entry) for key, entry in entries if _is_choice(entry)}


def _is_choice(entry: Any) -> bool:
    if not (isinstance(entry, list) and len(entry) == len(Choice._fields) and isinstance(entry[2], dict)):
        return False
    algorithm, guess, times = entry
    are_names = isinstance(algorithm, str) and isinstance(guess, str)
    return are_names and all(isinstance(time, float) for time in times.values())
