"""Lets programs written for a GPU run on the CPU: `torch.cuda` and all device arguments mean the CPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from nano_loop.cpu import peak_memory, read_machine, resident_memory
from nano_loop.patching.attributes import replaced
from nano_loop.patching.patch_table import until_undone

_FILLED = ("zeros", "ones", "empty", "full", "rand", "randn", "randint")
#: Functions of torch with a device argument.
_FACTORIES = (
    *("tensor", "as_tensor", "scalar_tensor", "randperm", "normal", "eye", "arange", "linspace", "logspace"),
    *_FILLED,
    *(f"{name}_like" for name in _FILLED),
    *("set_default_device", "is_autocast_enabled", "get_autocast_dtype"),
)
#: Methods of tensors with a device argument.
_METHODS = ("type", "new_tensor", "new_zeros", "new_ones", "new_empty", "new_full")
_CPU = torch.device("cpu")


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


#: Replacements of `torch.cuda`'s functions, for one device, the CPU. All others raise torch's own error.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda *_, **__: True),
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), _nothing),
    **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda *_: resident_memory() or 0),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda *_: peak_memory()),
    # Not torch.manual_seed, which calls this function.
    **dict.fromkeys(("manual_seed", "manual_seed_all"), lambda seed: torch.default_generator.manual_seed(seed)),
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda *_: f"{read_machine().name or 'unknown'} (CPU)",
    "get_device_capability": lambda *_: (0, 0),
    "get_rng_state": lambda *_: torch.get_rng_state(),  # torch.compile calls it, too
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
}

_lock = threading.Lock()


def patch_cuda() -> None:
    """Let programs written for a GPU run on the CPU, until `unpatch_cuda`.

    ``.cuda()``, ``.to("cuda")``, ``device="cuda"`` and ``map_location="cuda"`` mean the CPU. `torch.cuda.is_available`
    returns True, and the functions of `torch.cuda` that training scripts call report one device, the CPU; all others
    raise torch's own error. CUDA autocast becomes bf16 autocast on the CPU, even if fp16 was requested, and gradients
    are not scaled. Memory is not pinned. ``init_process_group("nccl")`` uses gloo. Tensors are not changed:
    ``x.device`` is the CPU and ``x.is_cuda`` is False.

    Names already imported from torch, as by ``from torch import zeros``, are not replaced. A second call has no effect.
    """
    with _lock:
        if is_cuda_patched():
            return
        # torch.compile looks up torch's functions at import, which each optimizer triggers. It must find the originals.
        torch.compiler.disable(_on_cpu)  # type: ignore[no-untyped-call]
        with ExitStack() as stack:
            for owner, name, make in _replacements():
                if hasattr(owner, name):
                    stack.enter_context(replaced(owner, name, make))
            until_undone[patch_cuda] = stack.pop_all()


def unpatch_cuda() -> None:
    """Restore everything that `patch_cuda` has replaced. Has no effect if it was not called."""
    with _lock:
        until_undone.pop(patch_cuda, ExitStack()).close()


def is_cuda_patched() -> bool:
    """Whether `patch_cuda` is active."""
    return patch_cuda in until_undone


def _replacements() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield an owner (module or class), the name of an attribute, and a function that returns its replacement."""
    for name in _FACTORIES:
        yield torch, name, _with_devices
    for name in _METHODS:
        yield torch.Tensor, name, _with_devices
    for owner in (torch.Tensor, nn.Module):
        yield owner, "to", _with_device_first
        yield owner, "cuda", _returning_itself
    yield torch.Tensor, "pin_memory", _returning_itself
    yield torch.UntypedStorage, "cuda", _returning_itself
    yield torch.TypedStorage, "cuda", _returning_itself
    yield nn.Module, "to_empty", _with_devices
    yield torch, "Generator", _with_generators
    yield torch, "load", _with_map_location
    yield torch.autocast, "__init__", _with_cpu_autocast
    yield torch.amp.GradScaler, "__init__", _without_scaling
    yield DataLoader, "__init__", _without_pinning
    yield nn.DataParallel, "__init__", _without_devices
    yield nn.parallel.DistributedDataParallel, "__init__", _without_device_ids
    yield torch.distributed, "init_process_group", _with_gloo
    yield torch.distributed, "new_group", _with_gloo
    for name, function in _FUNCTIONS.items():
        yield torch.cuda, name, functools.partial(_instead, function)


def _instead(replacement: Callable[..., Any], original: Any) -> Any:
    @functools.wraps(replacement)
    def call(*args: Any, **kwargs: Any) -> Any:  # torch.compile needs a separate function per name
        return replacement(*args, **kwargs)

    return call


def _on_cpu(value: Any) -> Any:
    """Return the CPU for a GPU device, also in dicts, a CPU tensor type for a GPU's, and other values unchanged."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str):
        if value == "cuda" or (value.startswith("cuda:") and value[5:].isdigit()):
            return "cpu"
        return value.replace("torch.cuda.", "torch.") if value.startswith("torch.cuda.") else value
    if type(value) is dict:
        return {_on_cpu(key): _on_cpu(item) for key, item in value.items()}
    return value


def _with_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes on the CPU for any device argument. Memory is not pinned."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _of_device_argument(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*map(_on_cpu, args), **kwargs)

    return call


def _with_device_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same for a method ``to``, whose first argument may be the index of a GPU."""
    plain = _with_devices(original)

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *map(_of_device_argument, args[:1]), *args[1:], **kwargs)

    return to


def _of_device_argument(value: Any) -> Any:
    """Return the device for ``device=``, where a number is the index of a GPU."""
    return _CPU if isinstance(value, int) and not isinstance(value, bool) else _on_cpu(value)


def _wrapping(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that makes a replacement, which calls `call` with the original as its first argument."""

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
        """Keeps ``isinstance(generator, torch.Generator)`` unchanged."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __call__(cls, device: Any = None) -> Any:
            return original(_on_cpu(device) if device is not None else "cpu")

    return Meta("Generator", (), {})


@_wrapping
def _with_map_location(original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    # Whatever a dict or a function maps to, only the CPU and the meta device exist.
    return original(f, map_location if str(map_location) == "meta" else "cpu", *args, **kwargs)


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
    # torch's own does the same if it finds no device.
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
