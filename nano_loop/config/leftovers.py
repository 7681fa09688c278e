"""Unsupported names: arguments of BigDL-Nano and LightningLite, removed options, and names of other trainers."""

from __future__ import annotations

from typing import Any, NamedTuple

from nano_loop.errors import error_message


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

#: Options that earlier commits had: the last two parts of the message.
REMOVED = {
    "loader_workers": ("it was removed: use `DataLoader(..., num_workers=2)`", "Omit it"),
    "fast_lstm": ("it was removed, and `fast_rnn` also covers LSTMs", "Omit it"),
    "fast_chains": ("it was removed, and layers are computed one by one", "Omit it"),
    "gradient_compression": ("it was removed, and gradients are sent in their own dtype", "Omit it"),
    "sync_buffers": ("it was removed, and at the end buffers are those of process 0", "Omit it"),
    "tune": ("it was removed: `nano-loop tune train.py` prints the options to write", "Omit it"),
}

_PLUGIN = (
    "the plugin was removed, and runs of nano_loop round products",
    "Write Trainer(precision='bf16-products') or NanoStrategy(precision='bf16-products'), and instead of Fabric "
    "nano_loop.TorchNano(precision='bf16-products')",
)
_TUNE = ("it was removed", "Run nano-loop tune train.py, which prints the options to write")
#: Other names that earlier commits had, in the same format: variables, flags of commands, and names of modules.
REMOVED_OTHERS = {
    "NANO_LOOP_SECRET": (
        "it was removed: ranks pickle values as torch.distributed does, and only the cluster's network protects them",
        "Unset it, and block all hosts except your own from the ranks' ports, as by a private network or a VPN",
    ),
    "doctor --torch": ("it was removed", "Run python -m torch.utils.collect_env for torch's version and build"),
    "env --shell": ("it was removed: the lines are for POSIX shells", "Omit it, or write nano-loop run"),
    "tune --again": ("it was removed: each search measures again", "Omit it"),
    **{f"nano_loop.{name}": _TUNE for name in ("tune", "Tuning")},
    **{f"nano_loop.lightning.{name}": _PLUGIN for name in ("precision", "ProductsPrecision")},
    **{f"nano_loop.pytorch_lightning.{name}": _PLUGIN for name in ("precision", "ProductsPrecision")},
}


def no_attribute(module: str, name: str) -> AttributeError:
    """Return the error for a name that a public module does not have or has lost."""
    got, removed = f"module {module!r} has no attribute {name!r}", REMOVED_OTHERS.get(f"{module}.{name}")
    return AttributeError(got if removed is None else error_message(got, *removed))


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
