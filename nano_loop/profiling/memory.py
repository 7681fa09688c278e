"""The memory of a training step: the tensors at the peak, with the activations by layer."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.profiler import record_function

from nano_loop.patching.optimizers import held_by
from nano_loop.profiling.kinds import OUTSIDE
from nano_loop.runtime.memory import bytes_of_states

#: The prefix of a layer's name in the trace event around its call.
_LAYER = "nano_loop: layer "


class LayerMarks:
    """Marks the calls of modules for the profiler until `close`."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._open: list[Any] = []
        self._stack = ExitStack()
        self._stack.callback(register_module_forward_pre_hook(self._begin).remove)
        self._stack.callback(register_module_forward_hook(self._end, always_call=True).remove)
        self.close = self._stack.close

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if not self._open:
            modules = nn.Module.named_modules(module)
            self._names = {id(inner): name or type(inner).__name__ for name, inner in modules}
        mark: Any = record_function(f"{_LAYER}{self._names.get(id(module), type(module).__name__)}")
        mark.__enter__()
        self._open.append(mark)

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


def memory_of(profiled: Any, optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """Return the bytes of each kind, with activations by layer, from a profile with memory and `LayerMarks`."""
    optimizers = [*optimizers]
    held_by_all = [parameter for optimizer in optimizers for parameter in held_by(optimizer)]
    parameters = {id(parameter): parameter for parameter in held_by_all}.values()
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(file := str(Path(folder, "trace.json")))
        events = json.loads(Path(file).read_text(encoding="utf-8"))["traceEvents"]
    held = held_at_peak(events)
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(parameter.grad for parameter in parameters),
        "states": sum(map(bytes_of_states, optimizers)),
        "activations": sum(held.values()) - held[OUTSIDE],
        "other": held[OUTSIDE],
        "layers": [{"layer": name, "bytes": count} for name, count in held.most_common() if name != OUTSIDE],
    }


def held_at_peak(events: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return the allocated bytes at the peak, by the innermost layer in whose call they were allocated."""
    moments = [event for event in events if event["name"] == "[memory]" or event["name"].startswith(_LAYER)]
    # The start and the end of each call, outermost first, with the allocations and deallocations in between.
    ordered: list[tuple[float, float, Mapping[str, Any]]] = []
    for event in moments:
        ordered.append((event["ts"], -event.get("dur", 0.0), event))
        if "dur" in event:
            ordered.append((event["ts"] + event["dur"], 0.0, {"name": ""}))
    ordered.sort(key=lambda moment: moment[:2])
    blocks: dict[int, tuple[str, int]] = {}
    layers: list[str] = []
    held: Counter[str] = Counter()
    total = most = 0
    peak: Counter[str] = Counter()
    for _, _, event in ordered:
        if event["name"].startswith(_LAYER):
            layers.append(event["name"].removeprefix(_LAYER))
        elif not event["name"]:
            layers.pop()
        elif event["args"]["Bytes"] > 0:
            layer, count = blocks[event["args"]["Addr"]] = (layers or [OUTSIDE])[-1], event["args"]["Bytes"]
            held[layer] += count
            total += count
            if total > most:
                most, peak = total, held.copy()
        elif event["args"]["Addr"] in blocks:  # otherwise it was allocated before the profile
            layer, count = blocks.pop(event["args"]["Addr"])
            held[layer] -= count
            total -= count
    return Counter({layer: count for layer, count in peak.items() if count})


def _bytes(values: Iterable[Any]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))
