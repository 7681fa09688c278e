"""The process group's transport takes memory for its buckets once."""

import sys

import cloudpickle
import torch

from distributed.shared_memory import transports
from distributed.shared_memory.transports import opened

# The processes of a team do not find the tests' modules by name.
cloudpickle.register_pickle_by_value(transports)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

KIND = "process group"


def test_buffers_are_used_again(team):
    def run(ranks):
        made, original = [], torch.empty

        def counting(*args, **kwargs):
            made.append(args)
            return original(*args, **kwargs)

        transport = opened(KIND, ranks, None)
        counts = []
        torch.empty = counting
        try:
            for _ in range(3):
                transport.average([torch.ones(3000), torch.ones(3000, dtype=torch.bfloat16)])
                counts.append(len(made))
        finally:
            torch.empty = original
        transport.close()
        return counts

    for first, second, third in team(2)(run):
        assert 0 < first == second == third
