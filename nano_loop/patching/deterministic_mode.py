"""Checks whether measured times may affect how results are computed, which torch's deterministic mode forbids.

The mode is process-wide, and a loop may enable it at any time, so every choice checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from nano_loop.patching.attributes import replaced
from nano_loop.patching.patch_table import listening
from nano_loop.patching.torch_private import SETTER_OF_DETERMINISM


def may_depend_on_times() -> bool:
    """Whether results may depend on measured times, including those of earlier runs."""
    return not torch.are_deterministic_algorithms_enabled()


def told_when_deterministic(listener: Callable[[], object]) -> AbstractContextManager[None]:
    """Call a function when the mode is enabled, to reset choices that otherwise persist over many steps."""
    return listening(told_when_deterministic, listener, _telling)


@contextmanager
def _telling() -> Iterator[list[Callable[[], object]]]:
    listeners: list[Callable[[], object]] = []

    def telling(setter: Callable[..., None]) -> Callable[..., None]:
        def set_and_tell(*args: Any, **kwargs: Any) -> None:
            might = may_depend_on_times()
            setter(*args, **kwargs)
            if might and not may_depend_on_times():
                for listener in [*listeners]:
                    listener()

        return set_and_tell

    with replaced(*SETTER_OF_DETERMINISM, telling):
        yield listeners
