"""Names that are no options: arguments of BigDL-Nano and LightningLite, removed options, names of other trainers."""

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

#: Options that earlier commits had: the last two parts of the message.
REMOVED = {
    "loader_workers": ("it was removed: `DataLoader(..., num_workers=2)` has workers", "Leave it out"),
    "fast_chains": ("it was removed, and layers are computed one by one", "Leave it out"),
    "gradient_compression": ("it was removed, and gradients travel in their own dtype", "Leave it out"),
    "sync_buffers": ("it was removed, and buffers are those of process 0 at the end", "Leave it out"),
    "tune": ("it was removed: `nano-loop tune train.py` prints the options to write", "Leave it out"),
}

#: Variables that earlier commits read and that were no options: the same.
REMOVED_VARIABLES = {
    "NANO_LOOP_SECRET": (
        "it was removed: ranks pickle values as torch.distributed does, and only the cluster's network protects them",
        "Unset it, and keep all but your own hosts from the ranks' ports, as by a private network or a VPN",
    ),
}

#: What other trainers name what an option here is for: the option, by the name. Misspelled options are found without.
NAMES_ELSEWHERE = {
    **dict.fromkeys(("use_amp", "amp", "autocast", "mixed_precision", "fp16", "bf16", "half", "dtype"), "precision"),
    **dict.fromkeys(("nproc", "nprocs", "world_size", "nproc_per_node", "n_jobs"), "num_processes"),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "num_workers in each DataLoader"),
    **dict.fromkeys(("memory_format", "nhwc"), "channels_last"),
    **dict.fromkeys(("jit", "torch_compile", "compile_model"), "compile"),
    **dict.fromkeys(("deterministic", "reproducible"), "exact"),
    **dict.fromkeys(("threads", "omp_num_threads", "nthreads"), "num_threads"),
    **dict.fromkeys(("backend", "ddp_backend"), "process_group_backend"),
    **dict.fromkeys(("quiet", "silent"), "verbose"),
}
