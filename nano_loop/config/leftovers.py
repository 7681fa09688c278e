"""Unsupported names: arguments of BigDL-Nano and LightningLite, and the names of options in other trainers."""

from __future__ import annotations

from typing import Any, NamedTuple


class Leftover(NamedTuple):
    """An argument of BigDL-Nano and LightningLite that has no effect here."""

    #: The values that request the same as nano_loop does. None: all values.
    tolerated: tuple[Any, ...] | None
    #: The last two parts of the message.
    expected: str
    hint: str

    def tolerates(self, value: Any) -> bool:
        """Whether the argument may have this value."""
        return self.tolerated is None or any(type(value) is type(other) and value == other for other in self.tolerated)


LEFTOVERS = {
    "strategy": Leftover(None, "nano_loop has only one strategy, so the argument has no effect", "Omit it"),
    "accelerator": Leftover((None, "auto", "cpu"), "nano_loop trains on the CPU", "Omit it"),
    "devices": Leftover((None, "auto", 1, "1"), "num_processes counts the processes", "Write num_processes instead"),
    "num_nodes": Leftover((None, 1), "several hosts need Ray, torchrun, srun or mpirun", "Omit it"),
    "plugins": Leftover((None, [], ()), "nano_loop has no plugins", "Omit it"),
}

#: The options by their names in other trainers. Misspelled options need no entry.
NAMES_ELSEWHERE = {
    **dict.fromkeys(("use_amp", "amp", "autocast", "mixed_precision", "fp16", "bf16", "half", "dtype"), "precision"),
    **dict.fromkeys(("nproc", "nprocs", "world_size", "nproc_per_node", "n_jobs"), "num_processes"),
    **dict.fromkeys(("num_workers", "workers", "dataloader_num_workers"), "num_workers in each DataLoader"),
    **dict.fromkeys(("memory_format", "nhwc"), "channels_last"),
    **dict.fromkeys(("jit", "torch_compile", "compile_model"), "compile"),
    **dict.fromkeys(("deterministic", "reproducible"), "exact"),
    **dict.fromkeys(("threads", "omp_num_threads", "nthreads"), "num_threads"),
    **dict.fromkeys(("backend", "ddp_backend"), "process_group_backend"),
    **dict.fromkeys(("quiet", "silent"), "verbose"),
}
