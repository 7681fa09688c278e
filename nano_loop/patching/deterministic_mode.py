"""Says whether measured times may decide how something is computed, which torch's deterministic mode forbids.

The mode is of the process, and a loop may switch it on at any time, so each choice asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nano_loop.patching.attributes import replaced
from nano_loop.patching.patch_table import process_wide
from nano_loop.patching.torch_private import SETTER_OF_DETERMINISM

_listeners: list[Callable[[], object]] = process_wide("listeners to the deterministic mode", [])


def may_depend_on_times() -> bool:
    """Whether what is computed may depend on measured times now, also on those of earlier runs."""
    return not torch.are_deterministic_algorithms_enabled()


@contextmanager
def told_when_deterministic(listener: Callable[[], object]) -> Iterator[None]:
    """Call a function when the mode is switched on: what holds for many steps is then to be as before measurements."""
    _listeners.append(listener)
    try:
        with replaced(*SETTER_OF_DETERMINISM, _telling):
            yield
    finally:
        _listeners.remove(listener)


def _telling(setter: Callable[..., None]) -> Callable[..., None]:
    def set_and_tell(*args: Any, **kwargs: Any) -> None:
        might = may_depend_on_times()
        setter(*args, **kwargs)
        if might and not may_depend_on_times():
            for listener in [*_listeners]:
                listener()

    return set_and_tell
