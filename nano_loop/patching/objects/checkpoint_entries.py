"""Entries of runs in the checkpoints of optimizers: they stand in the first parameter group, and never in a live group.

`torch.distributed.checkpoint` looks up the entries of a flattened checkpoint by the keys of the live groups, and so
drops those of runs. During a run they are put back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch.optim import Optimizer

from nano_loop.patching.attributes import replaced
from nano_loop.patching.patch_table import shared_change
from nano_loop.patching.torch_private import FLATTENED_STATES
from nano_loop.patching.when_imported import WhenImported

#: The number of steps that the ramp of the learning rate has taken.
RAMP = "auto_lr_step"

_MODULE, _UNFLATTEN = FLATTENED_STATES


def with_entries(state_dict: dict[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the state of an optimizer with entries in its first group."""
    first, *others = state_dict["param_groups"]
    return {**state_dict, "param_groups": [{**first, **entries}, *others]}


def pop_entry(optimizer: Optimizer, key: str) -> Any:
    """Remove an entry that a checkpoint has left in the groups of an optimizer. Return it, or None."""
    values = [group.pop(key) for group in optimizer.param_groups if key in group]
    return values[0] if values else None


def flattened_states_complete() -> AbstractContextManager[None]:
    """Return a context in which optimizers load the entries of flattened checkpoints, too."""
    return shared_change(FLATTENED_STATES, _completed_once_imported)


@contextmanager
def _completed_once_imported() -> Iterator[None]:
    with ExitStack() as undoing:

        def complete(module: ModuleType, name: str) -> None:
            undoing.enter_context(replaced(module, name, _completed))

        if _MODULE in sys.modules:
            complete(sys.modules[_MODULE], _UNFLATTEN)
        else:
            finder = WhenImported({_MODULE: _UNFLATTEN}, complete)
            undoing.callback(sys.meta_path.remove, finder)
            sys.meta_path.insert(0, finder)
        yield


def _completed(unflatten: Callable[..., Any]) -> Callable[..., Any]:
    def unflatten_with_entries(optimizer: Optimizer, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        state = unflatten(optimizer, state_dict, *args, **kwargs)
        for group in state["param_groups"]:
            values = [state_dict.get(f"param_groups.{name}.{RAMP}") for name in group["params"]]
            group.update((RAMP, value) for value in values if value is not None)
        return state

    return unflatten_with_entries
