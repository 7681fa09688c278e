"""The functions of `torch.cuda` for one device, the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import torch

from nano_loop.cpu import peak_memory, read_machine
from nano_loop.errors import NanoError, error_message
from nano_loop.integrations.cuda_calls.streams import Event, Stream

_STREAM = Stream()


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _value(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _context(*_: Any, **__: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _stream(stream: Any = None) -> Any:
    return _STREAM if stream is None else stream


def _memory(*_: Any, **__: Any) -> int:
    """Return the bytes of memory that this process uses."""
    return int(psutil.Process().memory_info().rss)


def _peak(*_: Any, **__: Any) -> int:
    return peak_memory()


def _free_and_total(*_: Any, **__: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def _properties(*_: Any, **__: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=_name(),
        total_memory=_free_and_total()[1],
        multi_processor_count=torch.get_num_threads(),
        major=0,
        minor=0,
        is_integrated=True,
        is_multi_gpu_board=False,
    )


def _name(*_: Any, **__: Any) -> str:
    return f"{read_machine().name or 'unknown'} (CPU)"


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which calls this function


def _set_states(states: Sequence[torch.Tensor]) -> None:
    for state in states[:1]:
        torch.set_rng_state(state)


def refused(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises, in place of one that has no meaning on a CPU."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        got = f"{name} was called after patch_cuda()"
        raise NanoError(error_message(got, "it has no meaning on a CPU", "Leave it out where there is no GPU"))

    return refuse


_PEAKS = ("peak_memory_stats", "accumulated_memory_stats", "max_memory_allocated", "max_memory_cached")

FUNCTIONS: dict[str, Any] = {
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), _value(True)),
    "device_count": _value(1),
    "current_device": _value(0),
    **dict.fromkeys(("is_current_stream_capturing", "is_tf32_supported", "can_device_access_peer"), _value(False)),
    **dict.fromkeys(("get_arch_list", "list_gpu_processes"), _value([])),
    **dict.fromkeys(("utilization", "temperature", "power_draw", "clock_rate"), _value(0)),
    **dict.fromkeys(("init", "set_device", "synchronize", "empty_cache", "ipc_collect", "set_stream"), _nothing),
    **dict.fromkeys(("set_sync_debug_mode", "set_per_process_memory_fraction"), _nothing),
    **dict.fromkeys([f"reset_{peak}" for peak in _PEAKS], _nothing),
    **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), _memory),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), _peak),
    **dict.fromkeys(("device", "device_of"), _context),
    **dict.fromkeys(("current_stream", "default_stream"), _value(_STREAM)),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), _seed),
    "memory_stats": _value({}),
    "memory_summary": lambda *_, **__: f"{_memory() / 1e6:.0f} MB of memory in use by this process, on the CPU",
    "mem_get_info": _free_and_total,
    "get_device_name": _name,
    "get_device_properties": _properties,
    "get_device_capability": _value((0, 0)),
    "get_sync_debug_mode": _value(0),
    "seed": lambda: torch.default_generator.seed(),
    "seed_all": lambda: torch.default_generator.seed(),
    "initial_seed": lambda: torch.initial_seed(),
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    "set_rng_state_all": _set_states,
    "stream": _stream,
    "Stream": Stream,
    "Event": Event,
}

#: Functions of `torch.cuda.nvtx`, which mark places for NVIDIA's profiler.
NVTX: dict[str, Any] = {
    "range": _context,
    **dict.fromkeys(("mark", "range_end"), _nothing),
    **dict.fromkeys(("range_push", "range_pop", "range_start"), _value(0)),
}

#: Names in `torch.cuda` that have no meaning on a CPU.
REFUSED = (
    *("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle", "cudart", "ExternalStream"),
    *("caching_allocator_alloc", "caching_allocator_delete", "change_current_allocator", "CUDAPluggableAllocator"),
    *("MemPool", "use_mem_pool", "memory_snapshot"),
)

#: The classes `torch.cuda.FloatTensor` and so on.
TENSOR_TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
