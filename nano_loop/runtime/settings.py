"""The settings of a run, read once from the arguments of a call, the environment and the machine.

Options that `nano-loop tune` has found to be the fastest for a script apply to later runs of that script. Some options
are attributes of `TorchNano` and the Trainer, as in BigDL-Nano.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from nano_loop.autotune.choices import Choice, choices_for
from nano_loop.config.declarations import MEASURING
from nano_loop.config.options import Options
from nano_loop.config.protocol import take_command
from nano_loop.cpu import Machine, read_machine
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.launch.join_run import expected_ranks, prepare
from nano_loop.distributed.launch_external.environment import found_launch, without_launch
from nano_loop.errors import NanoError, error_message
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
    """Save the `changes` that make a script, see `script_of_process`, fastest on a machine, for its later runs."""
    choices = choices_for(machine, threads=0)
    choices.put(_key(script, options, machine), Choice(json.dumps(changes), "{}", {}))
    choices.save()


def with_learnt(options: Options, machine: Machine, written: Collection[str]) -> Options:
    """Return the options of a call, with the changes that `nano-loop tune` has found.

    What the call, which names `written`, or the environment has set does not change, except ``num_processes="auto"``.
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


@dataclass(frozen=True)
class Settings:
    """The settings of a run: the options, and the machine."""

    options: Options
    machine: Machine

    @classmethod
    def read(cls, arguments: Mapping[str, Any], is_complete: bool = True) -> Settings:
        """Read the options of a call, the environment and `nano-loop tune`, and inspect the machine.

        Raises a `NanoConfigError` that lists all options that are invalid or, if they are complete, have no effect.
        """
        options, machine = Options.from_call(arguments), read_machine()
        # All online CPUs: a worker process, which imports the program again, may use only its share.
        cpus = len(machine.logical_cpus) if machine.quota is None else math.ceil(machine.quota)
        if is_complete:
            options.refuse_idle(cpus, is_launched=without_launch(os.environ) != os.environ)
        _refuse_missing_launch(options)
        return cls(with_learnt(options, machine, arguments), machine)

    def expected_ranks(self) -> Ranks:
        """Return this process's place in its next run, as far as it is known in advance."""
        return expected_ranks(self.options)

    def prepare(self, caller: object) -> None:
        """Start slow preparations for the next run if `caller` is the script's: a module may have none."""
        if getattr(caller, "__module__", None) == "__main__":
            prepare(self.options, self.machine)


def _refuse_missing_launch(options: Options) -> None:
    """Raise a `NanoError` if the processes of ``"k8s"`` were not started."""
    if options.distributed_backend == "k8s" and options.processes > 1 and found_launch(os.environ) is None:
        got = f"{options.as_written['distributed_backend']}, {options.as_written['num_processes']}"
        expected = "the processes must have been started from outside, with RANK and WORLD_SIZE in their environments"
        raise NanoError(error_message(got, expected, 'Start them with a PyTorchJob or torchrun, or pass "subprocess"'))


def _option(name: str, doc: str) -> Any:
    """Return a read-only property for an option."""
    return property(lambda self: getattr(self._nano_settings.options, name), doc=doc)


class OptionAttributes:
    """Read-only attributes of an object that has ``_nano_settings``, the `Settings` of its runs."""

    _nano_settings: Settings

    use_ipex: bool = _option("use_ipex", "Whether IPEX's kernels are used.")
    channels_last: bool | Literal["auto"] = _option("channels_last", "Whether images are NHWC.")
    auto_lr: bool = _option("auto_lr", "Whether the learning rate ramps to that of several processes.")

    @property
    def cpu_for_each_process(self) -> list[list[int]] | int | None:
        """The CPU ids of each process, the number of CPUs per process, or None for even shares."""
        shares = self._nano_settings.options.cpu_for_each_process
        return shares if shares is None or isinstance(shares, int) else [list(cpus) for cpus in shares]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which models compute matrix products."""
        return self._nano_settings.options.kind.compute
