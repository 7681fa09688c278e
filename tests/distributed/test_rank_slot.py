"""The ranks of a host get equal parts of it, or the CPUs of their lists."""

import pytest

from nano_loop.config.options import Options
from nano_loop.cpu import LogicalCpu, Machine
from nano_loop.distributed.comm import rank_slot as shares
from nano_loop.errors import NanoConfigError

FOUR = Machine("A CPU", "x86_64", tuple(LogicalCpu(id=cpu, physical_core=cpu) for cpu in range(4)), (0, 1, 2, 3))


def cpus(config, ranks):
    return [share.cpus for share in shares.shares_of(config, FOUR, ranks)]


def test_without_lists_shares_are_even():
    assert cpus(Options(num_processes=2), range(2)) == [(0, 1), (2, 3)]


def test_number_of_cpus_gives_each_rank_as_many():
    assert cpus(Options(num_processes=2, cpu_for_each_process=1), range(2)) == [(0,), (1,)]
    assert cpus(Options(num_processes=1, cpu_for_each_process=3), [0]) == [(0, 1, 2)]
    with pytest.raises(NanoConfigError, match=r"num_processes=2 with cpu_for_each_process=3: it needs 6 .*may use 4"):
        cpus(Options(num_processes=2, cpu_for_each_process=3), range(2))


def test_ranks_of_a_second_host_get_their_own_lists_though_the_first_names_the_same_cpus():
    config = Options(num_processes=4, cpu_for_each_process=[[0], [1], [1], [0]])
    assert cpus(config, [2, 3]) == [(1,), (0,)]


def test_lists_are_refused_where_nothing_can_be_bound(monkeypatch):
    monkeypatch.delattr(shares.os, "sched_setaffinity", raising=False)
    with pytest.raises(NanoConfigError, match=r"cpu_for_each_process=\[\[0\]\]: .*cannot bind.*Omit it"):
        cpus(Options(cpu_for_each_process=[[0]]), [0])
