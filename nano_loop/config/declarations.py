"""The declarations of the options: name, type, default, check and help of each.

Signatures, docstrings, environment variables, flags and `docs/options.md` follow from them. It does not import torch,
so that the command line knows the options at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal

from nano_loop.config import option_checks as checks


def option(default: Any, check: checks.Check, help: str, *, changes_bits: bool = False) -> Any:
    """Declare an option, whose name and type are those of the field.

    Parameters
    ----------
    default : object
        The default value.
    check : callable
        A check from `nano_loop.config.option_checks`, which defines the allowed values, including ``"auto"``.
    help : str
        A description for docstrings and `docs/options.md`.
    changes_bits : bool
        Whether it can change a bit of what plain torch computes in fp32. With ``exact=True`` its value is in `EXACT`.
    """
    metadata = {"check": check, "help": help, "changes_bits": changes_bits}
    return field(default=default, metadata=metadata)


def switch(default: bool, help: str, *, changes_bits: bool = False) -> Any:
    """Declare an option that is on or off."""
    return option(default, checks.boolean, help, changes_bits=changes_bits)


def step(help: str, *, changes_bits: bool) -> Any:
    """Declare the option of a step that is applied, unless the user leaves it out, where it applies."""
    return option("auto", checks.auto_or_boolean, help, changes_bits=changes_bits)


@dataclass(frozen=True)
class Declarations:
    """The options, as they are declared: the base class of `Options`.

    Each of them is an argument of `nano_loop.TorchNano` and `nano_loop.nano`, an entry of their docstrings, an
    environment variable, and an entry of the report.
    """

    # BigDL-Nano's eight, in its order and with its defaults. Its `nano` had no process_group_backend.
    num_processes: int | None = option(
        None,
        checks.num_processes,
        "Number of data-parallel processes. `None`: one, or as many as `torchrun`, `srun` or `mpirun` has started.",
    )
    use_ipex: bool = switch(
        False,
        'Kernels of Intel Extension for PyTorch. Needs torch 2.8 and `pip install "nano-loop[ipex]"`. From 0.9 to 1.2 '
        "times as fast as without; the report says which, once a process has run both.",
        changes_bits=True,
    )
    distributed_backend: str = option(
        "subprocess",
        checks.distributed_backend,
        'Starter of the processes. `"spawn"` is another name for `"subprocess"`. `"ray"`: Ray, on the nodes of its '
        'cluster; needs `pip install "nano-loop[ray]"`. `"k8s"`: they have been started from outside, as by torchrun.',
    )
    process_group_backend: str | None = option(
        None,
        checks.process_group_backend,
        "Backend of torch.distributed between processes. `None`: shared memory on one host, gloo between hosts.",
    )
    precision: int | str = option(
        32,
        checks.precision,
        'Precision of the models. `"bf16"`: bf16 autocast around each call into a model, with outputs in fp32. '
        '`"bf16-products"` or `"auto"`: fp32, with the inputs of matrix products rounded to bf16 where that is faster. '
        '`"bf16-true"`: parameters and inputs in bf16, half the memory. `64`: both in fp64. '
        "`16`: fp32, with the inputs of large products rounded to fp16; not faster than `32`.",
        changes_bits=True,
    )
    cpu_for_each_process: Sequence[Sequence[int]] | int | None = option(
        None,
        checks.cpu_for_each_process,
        "CPU ids of each process, such as `[[0, 1], [2, 3]]`, or how many CPUs each has. `None`: even shares.",
    )
    channels_last: bool | Literal["auto"] = option(
        False,
        checks.auto_or_boolean,
        'NHWC layout for 4-D and 5-D inputs of models and of convolutions. `"auto"`: the layout that is faster in a '
        "measurement after the first batch.",
        changes_bits=True,
    )
    auto_lr: bool = switch(True, "Learning rate that ramps from 1× to N× over the first 1,000 steps, with N processes.")
    _: KW_ONLY
    exact: bool = switch(
        False,
        'What is set up computes to the bit what plain torch computes in fp32, with as many threads. Each `"auto"` '
        "that changes a bit is off, and any other value that does is an error.",
    )
    fused_optimizer: bool | Literal["auto"] = step(
        "Fused kernels of Adam, AdamW, SGD and Adagrad, where they are right.",
        changes_bits=True,
    )
    allocator: bool | Literal["auto"] = step("Freed memory that glibc keeps for the process.", changes_bits=False)
    fast_dropout: bool | Literal["auto"] = step(
        "The masks of torch's own generator, drawn about ten times as fast.",
        changes_bits=False,
    )
    fast_attention: bool | Literal["auto"] = step(
        "Attention in blocks by bf16 instructions of AVX-512, in reduced precision: several times as fast as torch's "
        "kernel. In fp32, in C where that is measured to be faster.",
        changes_bits=True,
    )
    fast_activation: bool | Literal["auto"] = step(
        "tanh, and GELU by tanh, by functions in C for bf16: about three times as fast. Needs torch 2.9 or later.",
        changes_bits=True,
    )
    fast_convolution: bool | Literal["auto"] = step(
        "Gradients of convolutions' weights in blocks by bf16 instructions, in reduced precision: 1.1 to 2.5 times as "
        "fast as oneDNN, for NHWC images. Needs torch 2.9 and AVX-512; else by plain "
        "matrix products where oneDNN is slow.",
        changes_bits=True,
    )
    fast_linear: bool | Literal["auto"] = step(
        "Large products of linear layers and of their gradients in blocks by bf16 instructions, in reduced precision: "
        "1.05 to 1.9 times as fast as oneDNN. In fp32, products in C where that is measured to be faster. Needs torch "
        "2.9 and, in reduced precision, AVX-512.",
        changes_bits=True,
    )
    fast_rnn: bool | Literal["auto"] = step(
        "RNNs, GRUs and LSTMs by products over all steps and a recurrence in C: RNNs and GRUs are 2 to 10 times as "
        "fast as torch's, LSTMs up to 2.7 times. Needs torch 2.9 or later and, at first use, a C compiler.",
        changes_bits=True,
    )
    fast_cross_entropy: bool | Literal["auto"] = step(
        "Cross-entropy over many classes in one pass over the logits, and of a language model's head without them: "
        "less time, and a fraction of the memory.",
        changes_bits=True,
    )
    fast_embedding: bool | Literal["auto"] = step(
        "Gradients of large embeddings by rows, in a tensor that stays, and steps of Adam, AdamW, SGD and Adagrad over "
        "the rows that change. Needs torch 2.9 or later.",
        changes_bits=True,
    )
    fast_norm: bool | Literal["auto"] = step(
        "Batch, group and layer norms at twice the speed of torch's kernels in reduced precision, and in fp32 where "
        "that is faster, as of RMS norms. Needs torch 2.9 or later.",
        changes_bits=True,
    )
    tune_operators: bool | Literal["auto"] = step(
        "Timing of the algorithms of products, attention, LSTMs and convolutions, in reduced precision, and in fp32 of "
        "what `fast_*` replaces, from the third step on. The fastest ones are kept for later runs too.",
        changes_bits=True,
    )
    fast_fetch: bool | Literal["auto"] = step(
        "Whole batches out of tensors and arrays in memory, in datasets of torch and of skorch and in those that only "
        "index; arrays of other datasets' samples stacked at once.",
        changes_bits=False,
    )
    num_threads: int | Literal["auto"] | None = option(
        None,
        checks.num_threads,
        'Compute threads of each process. `None`: one a physical core. `"auto"`: that or one thread, whichever is '
        "faster by 10% in steps of the loop; with `exact`, and with several processes, as `None`.",
    )
    fast_images: bool | Literal["auto"] = step(
        "Cache of decoded and resized images of torchvision's folders, exact to the bit.",
        changes_bits=False,
    )
    image_cache: int | str | os.PathLike[str] | None = option(  # noqa: RUF009
        None,
        checks.image_cache,
        'Place of these: bytes of memory such as `8e9` or `"8 GB"`, or a folder that stays. `None`: a quarter of the '
        "memory.",
    )
    exact_images: bool = switch(
        True,
        "Same pixels as without nano_loop. `False`: large JPEG files are decoded at a smaller size.",
        changes_bits=True,
    )
    compile: bool | Literal["whole"] | dict[str, Any] = option(  # noqa: RUF009
        False,
        checks.compile_arguments,
        "`torch.compile` of the blocks that a model repeats, once for each kind, or of all of it where it repeats "
        'none. `"whole"`: of all of it. A dict is passed on to torch. Takes 10 s or more at first, and gains little on '
        "a CPU.",
        changes_bits=True,
    )
    bf16_ops: Collection[str] | os.PathLike[str] = option(  # noqa: RUF009
        (),
        checks.operators,
        'Operators that run in bf16 under autocast, such as `["softmax"]`, or a file with a name a line. They override '
        "torch's lists for the models of the run.",
    )
    fp32_ops: Collection[str] | os.PathLike[str] = option(  # noqa: RUF009
        (),
        checks.operators_or_safe,
        "The same for fp32. `\"safe\"`: what CUDA's autocast runs in fp32 and the CPU's does not, such as softmax.",
    )
    compare_parameters: bool = switch(
        True,
        "Comparison of the parameters of all processes every 100 steps, with an error where they differ, and of the "
        "buffers, with a warning.",
    )
    worker_init: Callable[[], object] | None = option(  # noqa: RUF009
        None,
        checks.worker_init,
        "Function that each worker process calls before it reads the arguments: what your program has patched in "
        "torch, or registered with it, is not there in a worker.",
    )
    timeout: float = option(600.0, checks.seconds, "Seconds that a process waits for another.")
    verbose: bool | Literal["all"] = option(
        True, checks.verbosity, 'Report on standard error. `"all"`: also what every process prints.'
    )

    step_time: bool = switch(False, "Last line of the report with the time of a step, to compare options by.")
    log_casts: bool | str | os.PathLike[str] = option(  # noqa: RUF009
        False,
        checks.boolean_or_path,
        "Table of the casts of the third step, with what caused them and what they moved. A path: JSON in that file.",
    )
    verify: bool = switch(
        False,
        "Comparison of the first batch with the plain model in fp32 and fp64. It names the layer that is off.",
    )


@dataclass(frozen=True)
class NanoDeclarations(Declarations):
    """The options as `nano_loop.nano` takes them: one by name alone, which BigDL-Nano's did not have."""

    process_group_backend: str | None = field(default=None, kw_only=True)


#: What measures or compares a run, and changes nothing that it computes.
MEASURING = ("step_time", "log_casts", "verify")
DECLARED = fields(Declarations)
OPTIONS = tuple(declared.name for declared in DECLARED)
DEFAULTS: dict[str, Any] = {declared.name: declared.default for declared in DECLARED}
CHECKS: dict[str, checks.Check] = {declared.name: declared.metadata["check"] for declared in DECLARED}
#: The values, as the checks return them, with which the options that can change a bit change none.
EXACT: dict[str, Any] = {
    declared.name: declared.metadata["check"](False if declared.default == "auto" else declared.default)
    for declared in DECLARED
    if declared.metadata["changes_bits"]
}
