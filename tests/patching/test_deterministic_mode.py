"""torch's deterministic mode is noticed whenever and however it is enabled."""

import pytest
import torch
from torch import use_deterministic_algorithms

from nano_loop.patching.deterministic_mode import may_depend_on_times, told_when_deterministic

WAYS = {
    "imported by name": lambda: use_deterministic_algorithms(True),
    "warnings alone": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "debug mode": lambda: torch.set_deterministic_debug_mode("error"),
    "debug mode that warns": lambda: torch.set_deterministic_debug_mode(1),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_listeners_are_told_each_time_that_it_is_switched_on(way):
    told, setter = [], torch._C._set_deterministic_algorithms
    try:
        with told_when_deterministic(lambda: told.append(may_depend_on_times())):
            assert may_depend_on_times()
            for _ in range(2):
                way()
                way()  # this changes nothing
                torch.use_deterministic_algorithms(False)
        assert told == [False, False]
        way()
        assert len(told) == 2
        assert torch._C._set_deterministic_algorithms is setter
    finally:
        torch.use_deterministic_algorithms(False)
