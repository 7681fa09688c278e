"""The options that `nano-loop tune` has found to be the fastest for a script, for later runs of that script."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nano_loop.autotune.choices import Choice, choices_for
from nano_loop.config.declarations import MEASURING
from nano_loop.config.options import Options
from nano_loop.config.protocol import take_command
from nano_loop.cpu import Machine
from nano_loop.distributed.launch_external.environment import without_launch
from nano_loop.errors import NanoError
from nano_loop.storage.cache_folder import cache_path

#: Options that do not affect which options are fastest.
_IDLE = {*MEASURING, "verbose", "timeout"}


def script_of_process() -> str | None:
    """Return an identifier of this process's script and its version; None if it is not a file."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def learn(machine: Machine, script: str, options: Options, changes: Mapping[str, Any]) -> None:
    """Save the fastest options of a script on a machine, for later runs of it with these options.

    Parameters
    ----------
    machine : Machine
        The machine.
    script : str
        See `script_of_process`.
    options : Options
        The options of the script.
    changes : mapping
        The options whose values change.
    """
    choices = choices_for(machine, threads=0)
    choices.put(_key(script, options, machine), Choice(json.dumps(changes), "{}", {}))
    choices.save()


def with_learnt(options: Options, machine: Machine, written: Collection[str]) -> Options:
    """Return the options of a call, with the changes that `nano-loop tune` has found.

    Options that the program or the environment has set do not change, except ``num_processes="auto"``. Neither does the
    precision: `learn` saves the fastest options per precision.

    Parameters
    ----------
    options : Options
        The options.
    machine : Machine
        The machine.
    written : collection of str
        The options that the call names.
    """
    place, command = cache_path(), take_command()
    asked_for = {"num_processes"} if options.num_processes == "auto" else set()
    # A script that is being tuned, and processes that may read other files, use the options as written.
    is_as_written = (command is not None and command.name == "tune") or without_launch(os.environ) != os.environ
    if place is None or not place.is_dir() or is_as_written:
        return options
    choices = choices_for(machine, threads=0)
    script = script_of_process() if len(choices) else None
    choice = None if script is None else choices.get(_key(script, options, machine))
    if choice is None:
        return options
    try:
        changes = json.loads(choice.algorithm)
        if ({*written, *options.set_by_environment} - asked_for) & changes.keys():
            return options
        return options.learnt_to(changes)
    except (ValueError, AttributeError, TypeError, NanoError):  # the file was edited
        return options


def _key(script: str, options: Options, machine: Machine) -> str:
    values = {name: value for name, value in options.as_dict().items() if name not in _IDLE}
    values["cores"] = machine.num_threads  # with fewer, as in a container, other options are the fastest
    return f"tune {script} {hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:16]}"
