"""The declarations of the options: the name, type, default, check and help of each.

Signatures, docstrings, environment variables, flags and `docs/options.md` are generated from them. This module does not
import torch, to keep the command line fast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal, NamedTuple

from nano_loop.config import option_checks as checks
from nano_loop.config.precisions import PRECISIONS, PrecisionName


class Need(NamedTuple):
    """A condition for an option to have an effect. If it is not met, an option set by the program is an error."""

    of: str  # the option that it depends on
    is_met: Callable[[Mapping[str, Any]], bool]  # called with the values of all options, and "cpus", those of the host
    expected: str  # the last two parts of the message
    hint: str


_SEVERAL = Need(
    "num_processes",
    lambda values: values["num_processes"] not in (None, 1) or values["distributed_backend"] == "k8s",
    "it is only for several processes",
    "Pass num_processes=2 or more, or omit it",
)
_AUTOCAST = Need(
    "precision",
    lambda values: PRECISIONS[values["precision"]].autocast_name is not None,
    "only autocast chooses a dtype per operator",
    'Pass precision="bf16", or omit it',
)
_FP32_STATE = Need(
    "precision",
    lambda values: PRECISIONS[values["precision"]].parameters_name != "float64",
    "then moments are in fp64, too",
    "Remove one of the two",
)
_CACHE = Need(
    "fast_images",
    lambda values: values["fast_images"] is not False,
    "it is for the cache of fast_images",
    "Remove one of the two",
)
_CPUS = Need(
    "num_threads",
    lambda values: (
        values["distributed_backend"] == "ray"
        or values["num_threads"] in (None, "auto")
        or values["num_threads"] <= values["cpus"]
    ),
    "this host has fewer CPUs, and threads that share a CPU wait for each other",
    "Omit it for one thread per physical core",
)


def option(
    default: Any, check: checks.Check, help: str, *, changes_bits: bool = False, needs: Need | None = None
) -> Any:
    """Declare an option, whose name and type the field defines.

    `changes_bits` is whether it can change a bit of the results of plain torch in fp32: ``exact=True`` sets its value
    in `EXACT`.
    """
    metadata = {"check": check, "help": help, "changes_bits": changes_bits, "needs": needs}
    return field(default=default, metadata=metadata)


def switch(default: bool, help: str, *, changes_bits: bool = False, needs: Need | None = None) -> Any:
    """Declare an option that is on or off."""
    return option(default, checks.boolean, help, changes_bits=changes_bits, needs=needs)


def step(help: str, *, changes_bits: bool) -> Any:
    """Declare the option of a step that is applied whenever it is applicable, unless the user disables it."""
    return option("auto", checks.auto_or_boolean, help, changes_bits=changes_bits)


@dataclass(frozen=True)
class Declarations:
    """The declared options: the base class of `Options`, and the source of arguments, docstrings and variables."""

    # BigDL-Nano's eight options, in its order and with its defaults. Its `nano` had no process_group_backend.
    num_processes: int | Literal["auto"] | None = option(
        None,
        checks.num_processes,
        "Runs this many data-parallel processes. `None`: one, or as many as `torchrun`, `srun` or `mpirun` starts. "
        '`"auto"`, with `split_batches=True`: the number that `nano-loop tune` found to be fastest, otherwise `None`.',
    )
    use_ipex: bool = switch(
        False,
        "Uses the kernels of Intel Extension for PyTorch: `pip install torch==2.8.0 "
        "intel-extension-for-pytorch==2.8.0`. From 0.9 to 1.2 times as fast as without; `nano-loop tune` measures "
        "which.",
        changes_bits=True,
    )
    distributed_backend: str = option(
        "subprocess",
        checks.distributed_backend,
        'Chooses the launcher of the processes. `"spawn"` is another name for `"subprocess"`. `"ray"`: Ray, on the '
        'nodes of its cluster; needs `pip install "ray>=2.51"`. `"k8s"`: they are started from outside, such as by '
        "torchrun.",
        needs=_SEVERAL,
    )
    process_group_backend: str | None = option(
        None,
        checks.process_group_backend,
        "Chooses the backend of torch.distributed between processes. `None`: shared memory on one host, gloo between "
        "hosts.",
        needs=_SEVERAL,
    )
    precision: PrecisionName = option(  # noqa: RUF009
        32,
        checks.precision,
        'Sets the precision of models. `"bf16"`: bf16 autocast around each call into a model, with outputs in fp32. '
        '`"bf16-products"` or `"auto"`: fp32, with the inputs of matrix products rounded to bf16 if that is faster. '
        '`"bf16-true"`: parameters and inputs in bf16, half the memory. `64`: both in fp64. '
        "`16`: fp32, with the inputs of large products rounded to fp16; not faster than `32`.",
        changes_bits=True,
    )
    cpu_for_each_process: Sequence[Sequence[int]] | int | None = option(
        None,
        checks.cpu_for_each_process,
        "Gives each process its CPUs: ids, such as `[[0, 1], [2, 3]]`, or how many. `None`: even shares.",
    )
    channels_last: bool | Literal["auto"] = option(
        False,
        checks.auto_or_boolean,
        'Converts 4-D and 5-D inputs of models and of convolutions to NHWC. `"auto"`: uses the layout that is faster '
        "in a measurement after the first batch.",
        changes_bits=True,
    )
    auto_lr: bool = switch(True, "Ramps the learning rate from 1× to N× over the first 1,000 steps, with N processes.")
    _: KW_ONLY
    split_batches: bool = switch(
        False,
        "Lets processes share each batch, so that N of them compute the same as one. Otherwise each takes "
        "different batches. With one process it has no effect.",
    )
    exact: bool = switch(
        False,
        'Computes bit for bit the same as plain torch in fp32 with the same number of threads. Each `"auto"` that '
        "changes a bit is off, and any other value that does is an error.",
    )
    fused_optimizer: bool | Literal["auto"] = step(
        "Updates weights by fused kernels of Adam, AdamW, SGD and Adagrad, if they compute the same.",
        changes_bits=True,
    )
    optimizer_state: Literal["32", 32, "bf16"] = option(
        "32",
        checks.fp32_or_bf16,
        'Keeps the moments of SGD, Adam and AdamW in fp32, or in `"bf16"` with stochastic rounding: '
        "half of their memory.",
        changes_bits=True,
        needs=_FP32_STATE,
    )
    frozen_dtype: Literal["32", 32, "bf16"] = option(
        "32",
        checks.fp32_or_bf16,
        'Keeps the values of frozen weights in fp32, or only in `"bf16"`, which takes half of their memory. The '
        "program sees weights in fp32, with the rounded values.",
        changes_bits=True,
    )
    allocator: bool | Literal["auto"] = step("Lets glibc keep freed memory for the process.", changes_bits=False)
    fast_dropout: bool | Literal["auto"] = step(
        "Generates the same masks as torch by vector instructions, about ten times as fast.",
        changes_bits=False,
    )
    fast_attention: bool | Literal["auto"] = step(
        "Computes attention in blocks by bf16 instructions of AVX-512, in reduced precision: several times as fast as "
        "torch's kernel. In fp32, in C if that is measured to be faster.",
        changes_bits=True,
    )
    fast_activation: bool | Literal["auto"] = step(
        "Computes tanh and tanh-approximated GELU of bf16 tensors in C: about three times as fast. Needs torch 2.9 or "
        "later.",
        changes_bits=True,
    )
    fast_convolution: bool | Literal["auto"] = step(
        "Computes gradients of convolutions' weights in blocks by bf16 instructions, in reduced precision: 1.1 to 2.5 "
        "times as fast as oneDNN, for NHWC images. Needs torch 2.9 and, except for biases, groups and depthwise "
        "convolutions, AVX-512.",
        changes_bits=True,
    )
    fast_linear: bool | Literal["auto"] = step(
        "Computes large products of linear layers and of their gradients in blocks by bf16 instructions, in reduced "
        "precision: 1.05 to 1.9 times as fast as oneDNN. In fp32, in C if that is measured to be faster. Needs "
        "torch 2.9 and, in reduced precision, AVX-512.",
        changes_bits=True,
    )
    fast_rnn: bool | Literal["auto"] = step(
        "Computes RNNs, GRUs and LSTMs by products over all steps and a recurrence in C: RNNs and GRUs are 2 to 10 "
        "times as fast as torch's, LSTMs up to 2.7 times. Needs torch 2.9 or later and, at first use, a C compiler.",
        changes_bits=True,
    )
    fast_cross_entropy: bool | Literal["auto"] = step(
        "Computes cross-entropy over many classes in one pass over the logits, and that of a language model's head "
        "without storing them: in less time, and in a fraction of the memory.",
        changes_bits=True,
    )
    fast_embedding: bool | Literal["auto"] = step(
        "Computes gradients of large embeddings by rows, in a tensor that is reused, and steps of Adam, AdamW, SGD and "
        "Adagrad over the rows that change. Needs torch 2.9 or later.",
        changes_bits=True,
    )
    fast_norm: bool | Literal["auto"] = step(
        "Computes batch, group, layer and RMS norms at twice the speed of torch's kernels in reduced precision, and in "
        "fp32 if that is faster. Needs torch 2.9 or later.",
        changes_bits=True,
    )
    tune_operators: bool | Literal["auto"] = step(
        "Times the algorithms of products, attention, LSTMs and convolutions in reduced precision, and of the "
        "operators that `fast_*` replaces in fp32, from the third step on. The fastest ones are saved for later runs.",
        changes_bits=True,
    )
    fast_fetch: bool | Literal["auto"] = step(
        "Slices whole batches from tensors and arrays in memory, in datasets of torch and of skorch and in those that "
        "only index; stacks arrays of other datasets' samples in one call.",
        changes_bits=False,
    )
    num_threads: int | Literal["auto"] | None = option(
        None,
        checks.num_threads,
        'Sets the compute threads of each process. `None`: one per physical core. `"auto"`: one thread instead, if '
        "steps of the loop are 10% faster with it, which `None` tries only if other programs use the CPUs in the first "
        "20 steps. With `exact` or several processes, the number does not change.",
        needs=_CPUS,
    )
    fast_images: bool | Literal["auto"] = step(
        "Caches decoded and resized images of torchvision's folders, bit for bit.",
        changes_bits=False,
    )
    image_cache: int | str | os.PathLike[str] | None = option(  # noqa: RUF009
        None,
        checks.image_cache,
        'Places the cache of `fast_images`: bytes of memory such as `8e9` or `"8 GB"`, or a persistent folder. `None`: '
        "a quarter of the memory.",
        needs=_CACHE,
    )
    exact_images: bool = switch(
        True,
        "Keeps pixels the same as without nano_loop. `False`: decodes large JPEG files at a smaller size.",
        changes_bits=True,
        needs=_CACHE,
    )
    compile: bool | Literal["whole"] | dict[str, Any] = option(  # noqa: RUF009
        False,
        checks.compile_arguments,
        "Compiles the repeated blocks of a model by `torch.compile`, once for each kind, or the whole model if there "
        'are none. `"whole"`: the whole model. A dict is passed to torch. Takes 10 s or more at first, and gains '
        "little on a CPU.",
        changes_bits=True,
    )
    bf16_ops: Collection[str] | os.PathLike[str] = option(  # noqa: RUF009
        (),
        checks.operators,
        'Runs these operators in bf16 under autocast: names such as `["softmax"]`, or a file with one name per line. '
        "They override torch's lists for the models of the run.",
        needs=_AUTOCAST,
    )
    fp32_ops: Collection[str] | os.PathLike[str] = option(  # noqa: RUF009
        (),
        checks.operators_or_safe,
        "Runs these operators in fp32. `\"safe\"`: those that CUDA's autocast runs in fp32 and the CPU's does not, "
        "such as softmax.",
        needs=_AUTOCAST,
    )
    compare_parameters: bool = switch(
        True,
        "Compares the parameters of all processes every 100 steps, with an error if they differ, and the buffers, "
        "with a warning.",
    )
    memory_limit: int | str | None = option(
        None,
        checks.memory_limit,
        'Limits the memory of all processes together, such as `"8 GB"`: training that needs more raises in its first '
        "step. A cgroup's limit also counts.",
    )
    worker_init: Callable[[], object] | None = option(  # noqa: RUF009
        None,
        checks.worker_init,
        "Calls this function in each worker process before it reads the arguments. Workers do not inherit patches of "
        "torch, or operators registered with it, from your program.",
    )
    timeout: float = option(600.0, checks.seconds, "Limits the seconds that a process waits for another.")
    verbose: bool | Literal["all"] = option(
        True, checks.verbosity, 'Prints the report on standard error. `"all"`: also what every process prints.'
    )

    step_time: bool = switch(False, "Adds the median step time to the report, to compare options.")
    log_casts: bool | str | os.PathLike[str] = option(  # noqa: RUF009
        False,
        checks.boolean_or_path,
        "Prints the casts of the third step, with their causes and sizes. A path: writes JSON there.",
    )
    verify: bool = switch(
        False,
        "Compares the first batch with the plain model in fp32 and fp64, and names the layer that differs.",
    )


@dataclass(frozen=True)
class NanoDeclarations(Declarations):
    """The options as `nano_loop.nano` accepts them: one that BigDL-Nano's lacked is keyword-only."""

    process_group_backend: str | None = field(default=None, kw_only=True)


#: Options that measure or compare a run, and do not change its results.
MEASURING = ("step_time", "log_casts", "verify")
DECLARED = fields(Declarations)
OPTIONS = tuple(declared.name for declared in DECLARED)
DEFAULTS: dict[str, Any] = {declared.name: declared.default for declared in DECLARED}
CHECKS: dict[str, checks.Check] = {declared.name: declared.metadata["check"] for declared in DECLARED}
NEEDS: dict[str, Need] = {declared.name: need for declared in DECLARED if (need := declared.metadata["needs"])}
#: The normalized values with which the options that can change a bit change none.
EXACT: dict[str, Any] = {
    declared.name: declared.metadata["check"](False if declared.default == "auto" else declared.default)
    for declared in DECLARED
    if declared.metadata["changes_bits"]
}
