"""The patches of torch for programs that were written for a GPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from nano_loop.integrations.cuda_calls.cuda_module import FUNCTIONS, NVTX, REFUSED, TENSOR_TYPES, refused
from nano_loop.integrations.cuda_calls.devices import on_cpu, with_device_first, with_devices
from nano_loop.patching.attributes import replaced
from nano_loop.patching.patch_table import process_wide

_FILLED = ("zeros", "ones", "empty", "full", "rand", "randn", "randint")
#: Functions of torch that take a device.
_FACTORIES = (
    *("tensor", "as_tensor", "asarray", "scalar_tensor", "from_file", "randperm", "normal", "eye"),
    *("arange", "range", "linspace", "logspace", "empty_strided", "empty_permuted", "tril_indices", "triu_indices"),
    *_FILLED,
    *(f"{name}_like" for name in _FILLED),
    *(f"sparse_{layout}_tensor" for layout in ("coo", "csr", "csc", "bsr", "bsc", "compressed")),
    *(f"{name}_window" for name in ("bartlett", "blackman", "hamming", "hann", "kaiser")),
    *("set_default_device", "set_default_tensor_type"),
    *("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"),
)
#: Methods of tensors that do.
_METHODS = ["type", "new_tensor", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"]

_patches: list[ExitStack] = process_wide("patches of CUDA", [])  # one at the most
_lock = threading.Lock()


def patch_cuda() -> None:
    """Let programs that were written for a GPU run on the CPU, until `unpatch_cuda`.

    ``.cuda()``, ``.to("cuda")`` and ``device="cuda"`` name the CPU. `torch.cuda.is_available` returns True, and the
    functions of `torch.cuda` answer for one device, the CPU. Autocast for CUDA becomes bf16 autocast of the CPU, also
    where fp16 was asked for, and gradients are not scaled. Streams are in order, events measure time, memory is not
    pinned. ``init_process_group("nccl")`` uses gloo. Tensors stay what they are: ``x.device`` is the CPU and
    ``x.is_cuda`` is False.

    What has no meaning on a CPU, such as `torch.cuda.CUDAGraph`, raises a `nano_loop.NanoError` when it is called.
    Names that were imported from torch before, as by ``from torch import zeros``, are not replaced. A second call has
    no effect.
    """
    with _lock:
        if _patches:
            return
        # torch.compile looks up torch's functions when it is imported, which each optimizer does: the original ones.
        torch.compiler.disable(on_cpu)  # type: ignore[no-untyped-call]
        with ExitStack() as stack:
            for owner, name, make in _replacements():
                if hasattr(owner, name):
                    stack.enter_context(replaced(owner, name, make))
            _patches.append(stack.pop_all())


def unpatch_cuda() -> None:
    """Put back all that `patch_cuda` has replaced. Without such a call before, it has no effect."""
    with _lock:
        while _patches:
            _patches.pop().close()


def is_cuda_patched() -> bool:
    """Whether `patch_cuda` is in force."""
    return bool(_patches)


def _replacements() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield a module or a class, a name in it, and what returns the replacement of an attribute."""
    for name in _FACTORIES:
        yield torch, name, with_devices
    for name in _METHODS:
        yield torch.Tensor, name, with_devices
    yield torch, "Generator", _with_generators
    yield torch, "load", _with_map_location
    yield torch.Tensor, "cuda", _returning_itself
    yield torch.Tensor, "pin_memory", _returning_itself
    yield torch.Tensor, "record_stream", functools.partial(_instead, FUNCTIONS["synchronize"])
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        yield storage, "cuda", _returning_itself
        yield storage, "pin_memory", _returning_itself
    yield nn.Module, "to", with_device_first
    yield torch.Tensor, "to", with_device_first
    yield nn.Module, "to_empty", with_devices
    yield nn.Module, "cuda", _returning_itself
    yield torch.autocast, "__init__", _with_cpu_autocast
    yield torch.amp.GradScaler, "__init__", _without_scaling
    yield DataLoader, "__init__", _without_pinning
    yield nn.DataParallel, "__init__", _without_devices
    yield nn.parallel.DistributedDataParallel, "__init__", _without_device_ids
    yield torch.distributed, "init_process_group", _with_gloo
    yield torch.distributed, "new_group", _with_gloo
    yield from _of_cuda()


def _of_cuda() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    for name, function in FUNCTIONS.items():
        yield torch.cuda, name, functools.partial(_instead, function)
    for name, function in NVTX.items():
        yield torch.cuda.nvtx, name, functools.partial(_instead, function)
    for name in REFUSED:
        yield torch.cuda, name, functools.partial(_instead, refused(f"torch.cuda.{name}"))
    for name in TENSOR_TYPES:
        yield torch.cuda, f"{name}Tensor", functools.partial(_instead, getattr(torch, f"{name}Tensor"))
    yield torch, "get_autocast_gpu_dtype", functools.partial(_instead, lambda: torch.get_autocast_dtype("cpu"))


def _instead(replacement: Any, original: Any) -> Any:
    if not isinstance(replacement, FunctionType):
        return replacement

    @functools.wraps(replacement)
    def call(*args: Any, **kwargs: Any) -> Any:  # torch.compile wants another function for each name
        return replacement(*args, **kwargs)

    return call


def _wrapping(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes the replacement of a function by one that takes the original first."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return replacement

    return make


@_wrapping
def _returning_itself(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _with_generators(original: Any) -> Any:
    class Meta(type):
        """Lets ``isinstance(generator, torch.Generator)`` be as before."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __call__(cls, device: Any = None) -> Any:
            return original(on_cpu(device) if device is not None else "cpu")

    return Meta("Generator", (), {})


@_wrapping
def _with_map_location(original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    return original(f, _location(map_location), *args, **kwargs)


def _location(map_location: Any) -> Any:
    """Return where `torch.load` puts storages: on the CPU, unless the program says otherwise."""
    if map_location is None:
        return "cpu"
    if not callable(map_location):
        return _cpu_of_all(map_location) if isinstance(map_location, dict) else on_cpu(map_location)

    def place(storage: Any, location: str) -> Any:
        placed = map_location(storage, location)
        return storage if placed is None else placed

    return place


def _cpu_of_all(mapping: dict[Any, Any]) -> Callable[[Any, str], Any]:
    """Return a function for a dict of locations, in which all that is not named goes to the CPU too."""

    def place(storage: Any, location: str) -> Any:
        wanted = on_cpu(mapping.get(location, "cpu"))
        return storage if wanted == "cpu" else None

    return place


@_wrapping
def _with_cpu_autocast(
    original: Any, self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any
) -> None:
    if device_type == "cuda":
        device_type, dtype = "cpu", torch.bfloat16 if dtype in (None, torch.float16) else dtype
    original(self, device_type, dtype, *args, **kwargs)


@_wrapping
def _without_scaling(original: Any, self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
    if device == "cuda":
        original(self, "cpu", enabled=False)
    else:
        original(self, device, *args, **kwargs)


@_wrapping
def _without_pinning(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    for name in ("pin_memory", "pin_memory_device"):
        kwargs.pop(name, None)
    original(self, *args, **kwargs)


@_wrapping
def _without_devices(original: Any, self: Any, module: nn.Module, *args: Any, dim: int = 0, **kwargs: Any) -> None:
    nn.Module.__init__(self)
    # As torch's own does where it finds no device.
    self.module, self.device_ids, self.dim, self.output_device = module, [], dim, None


@_wrapping
def _without_device_ids(
    original: Any,
    self: Any,
    module: nn.Module,
    device_ids: Any = None,
    output_device: Any = None,
    *args: Any,
    **kw: Any,
) -> None:
    original(self, module, None, None, *args, **kw)


@_wrapping
def _with_gloo(original: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("backend") is not None:
        kwargs["backend"] = _gloo(kwargs["backend"])
    kwargs.pop("device_id", None)
    return original(*map(_gloo, args), **kwargs)


def _gloo(value: Any) -> Any:
    return "gloo" if isinstance(value, str) and "nccl" in value.lower() else value
