"""Models that are not set up because they already are: by DDP, FSDP, Fabric, `torch.compile` or several processes."""

from __future__ import annotations

from torch import distributed, nn

from nano_loop.patching.torch_private_compiler import is_compiled
from nano_loop.steps.step import SkipReason

_BY_PROCESSES = SkipReason("distributed", "several processes train it")
#: Why modules in wrappers of other libraries are not set up, by the class names of the wrappers.
_WRAPPERS = {
    "DistributedDataParallel": _BY_PROCESSES,
    "FullyShardedDataParallel": _BY_PROCESSES,
    "FSDPModule": _BY_PROCESSES,
    "_FabricModule": SkipReason("fabric", "Fabric has set it up"),
}


def reason_to_leave(model: nn.Module) -> SkipReason | None:
    """Return why a model that is already set up is left unchanged, or None."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return _BY_PROCESSES
    for module in model.modules():
        if is_compiled(module):
            return SkipReason("compiled", "torch.compile has compiled it")
        for base in type(module).__mro__:
            if base.__name__ in _WRAPPERS:
                return _WRAPPERS[base.__name__]
    return None
