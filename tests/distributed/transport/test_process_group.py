"""The process group's transport has several averagings under way, and finishes them in order."""

import sys

import cloudpickle
import pytest
import torch

from distributed.transport import transports
from distributed.transport.transports import DTYPES, assert_means, opened, random_list

# The processes of a team do not find the tests' modules by name.
cloudpickle.register_pickle_by_value(transports)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

KIND = "process group"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("compression", [None, torch.bfloat16])
def test_several_averagings_are_under_way(team, size, compression):
    def run(ranks):
        transport = opened(KIND, ranks, None, compression=compression)
        lists = [random_list(seed, ranks.rank, DTYPES[:4]) for seed in range(30)]
        results = []
        for start in range(0, 30, 5):
            started = [transport.start(each) for each in lists[start : start + 5]]
            for each in started:
                each.finish()
            results += lists[start : start + 5]
        transport.close()
        return results

    by_rank = team(size)(run)
    for seed in range(30):
        lists = [random_list(seed, rank, DTYPES[:4]) for rank in range(size)]
        eps = compression and torch.finfo(compression).eps
        assert_means([results[seed] for results in by_rank], lists, eps)


def test_start_takes_the_values_of_its_moment_and_finish_may_write_elsewhere(team):
    def run(ranks):
        transport = opened(KIND, ranks, None)
        tensor, result = torch.full((40, 30), float(ranks.rank)).t(), torch.zeros(30, 40)
        started = transport.start([tensor])
        tensor.fill_(9)
        started.finish([result])
        transport.close()
        return tensor.unique().tolist(), result.unique().tolist()

    assert team(2)(run) == [([9.0], [0.5])] * 2


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
