"""The arguments of BigDL-Nano and LightningLite that have no effect: the values that are tolerated, and why."""

from __future__ import annotations

from typing import Any, NamedTuple


class Leftover(NamedTuple):
    """An argument of BigDL-Nano and LightningLite that has no effect here."""

    #: The values that ask for nothing else than nano_loop does. None: all.
    tolerated: tuple[Any, ...] | None
    #: The last two parts of the message.
    expected: str
    hint: str

    def tolerates(self, value: Any) -> bool:
        """Whether the argument may have this value."""
        return self.tolerated is None or any(type(value) is type(other) and value == other for other in self.tolerated)


LEFTOVERS = {
    "strategy": Leftover(None, "nano_loop has only one strategy, so the argument has no effect", "Leave it out"),
    "accelerator": Leftover((None, "auto", "cpu"), "nano_loop trains on the CPU", "Leave it out"),
    "devices": Leftover((None, "auto", 1, "1"), "num_processes counts the processes", "Write num_processes instead"),
    "num_nodes": Leftover((None, 1), "several hosts take Ray, torchrun, srun or mpirun", "Leave it out"),
    "plugins": Leftover((None, [], ()), "nano_loop has no plugins", "Leave it out"),
}
