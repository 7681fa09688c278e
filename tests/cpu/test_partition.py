"""Dividing cores among processes: even shares that straddle nodes only if necessary, the user's own, and errors."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_loop.cpu import LogicalCpu, Share, given_shares, partition, process_counts, read_machine, restricted
from nano_loop.cpu.reading import Host
from nano_loop.errors import NanoConfigError, NanoWarning

from .recording import built, machine_of


def test_one_cache_over_two_nodes_does_not_hide_their_boundary():
    # Intel's sub-NUMA clusters.
    cpus = [LogicalCpu(i, i, numa_node=i // 3, last_level_cache=0) for i in range(6)]
    assert [share.cpus for share in partition(machine_of(*cpus, quota=4), 2)] == [(0, 1), (3, 4)]


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (
            built([[64]], allowed=(0, 1, 2, 3, 4), quota=4.5),
            "num_processes=8: it needs 8 physical cores, and this process may use 4 (CPUs 0-4 of 64, quota 4.5). "
            "Lower num_processes, or widen the CPU affinity or the quota.",
        ),
        (
            built([[4]]),
            "num_processes=8: it needs 8 physical cores, and this process may use 4 (CPUs 0-3 of 4). "
            "Lower num_processes, or widen the CPU affinity.",
        ),
    ],
)
def test_more_processes_than_cores_are_refused_with_the_numbers(machine, message):
    with pytest.raises(NanoConfigError) as caught:
        partition(machine, 8)
    assert str(caught.value) == message


# --- any machine ---


@st.composite
def machines(draw, most_cores):
    """Machines whose caches lie within nodes, with or without siblings, hybrid or not, with some CPUs allowed."""
    count = draw(st.integers(1, most_cores))
    threads, hybrid = draw(st.integers(1, 2)), draw(st.booleans())
    cpus = []
    for core in range(count):
        node = draw(st.integers(0, 1))
        kind = draw(st.sampled_from(["performance", "efficiency"])) if hybrid else None
        cache = 2 * node + draw(st.integers(0, 1))
        cpus += [LogicalCpu(core + count * i, core, node, node, cache, kind) for i in range(threads)]
    every = sorted(cpu.id for cpu in cpus)
    allowed = draw(st.sets(st.sampled_from(every), min_size=1)) if draw(st.booleans()) else every
    quota = draw(st.none() | st.floats(0.5, 2.0 * count))
    return machine_of(*sorted(cpus, key=lambda cpu: cpu.id), allowed=tuple(sorted(allowed)), quota=quota)


def usable_cores(machine, count):
    by_id = {cpu.id: cpu for cpu in machine.logical_cpus}
    cores = [by_id[core[0]] for core in machine.physical_cores]
    performance = [cpu for cpu in cores if cpu.core_kind != "efficiency"]
    return performance if len(performance) >= count else cores


def node_of(cpu):
    return cpu.numa_node


def cache_of(cpu):
    return cpu.numa_node, cpu.last_level_cache


def can_place(cores, size, count, place):
    """Try every way to choose `count` disjoint sets of `size` cores, each within one place."""
    if count == 0:
        return True
    for chosen in combinations(cores, size):
        if len(set(map(place, chosen))) == 1:
            # Sets are ordered by their first core, so that each choice is tried only once.
            rest = [cpu for cpu in cores[cores.index(chosen[0]) :] if cpu not in chosen]
            if can_place(rest, size, count - 1, place):
                return True
    return False


@given(machines(most_cores=24), st.data())
def test_shares_are_even_disjoint_and_within_what_is_allowed(machine, data):
    count = data.draw(st.integers(1, machine.num_threads))
    shares = partition(machine, count)
    core_of = {cpu.id: cpu.physical_core for cpu in machine.logical_cpus}
    computing = [cpu for share in shares for cpu in share.cpus]
    loading = [cpu for share in shares for cpu in share.loader_cpus]
    assert len(shares) == count
    assert {len(share.cpus) for share in shares} == {
        min(len(usable_cores(machine, count)), machine.num_threads) // count
    }
    assert len({core_of[cpu] for cpu in computing}) == len(computing) <= machine.num_threads
    assert len(set(loading)) == len(loading)
    assert {*computing, *loading} <= set(machine.allowed)
    order = [core[0] for core in machine.physical_cores]
    for share in shares:
        assert list(share.cpus) == sorted(share.cpus, key=order.index)
        mine = {cpu for core in machine.physical_cores if core[0] in share.cpus for cpu in core}
        assert set(share.loader_cpus) == (mine - set(share.cpus) or set(share.cpus))
        assert restricted(machine, share, count).num_threads == len(share.cpus)


@given(machines(most_cores=7), st.data())
def test_no_share_straddles_where_any_placement_of_this_size_would_not(machine, data):
    count = data.draw(st.integers(1, machine.num_threads))
    shares = partition(machine, count)
    cores = usable_cores(machine, count)
    by_id = {cpu.id: cpu for cpu in cores}
    for place in (cache_of, node_of):
        if can_place(cores, len(shares[0].cpus), count, place):
            assert [len({place(by_id[cpu]) for cpu in share.cpus}) for share in shares] == [1] * count


# --- the user's own lists ---


def test_siblings_that_are_not_allowed_do_not_load(recorded):
    machine = read_machine(recorded("xeon_4309y_two_sockets"), Host(affinity=frozenset(range(16))))
    assert given_shares(machine, ((0, 1),)) == (Share((0, 1), (0, 1)),)


def test_cpus_that_cannot_be_used_are_left_out_with_one_warning_that_names_them(recorded):
    machine = read_machine(recorded("kubernetes_cpuset"))
    with pytest.warns(NanoWarning) as caught:
        shares = given_shares(machine, ((4, 64, 0), (5, 65, 1)))
    assert [share.cpus for share in shares] == [(4,), (5,)]
    assert [str(warning.message) for warning in caught] == [
        "cpu_for_each_process: omitted 64-65 (no such CPU), 0-1 (not in this process's affinity mask); "
        "this process may use CPUs 4-7,20-23 of 32. Remove them from the lists."
    ]
    assert caught[0].filename == __file__


def test_all_that_is_wrong_with_the_lists_is_said_at_once(recorded):
    machine = read_machine(recorded("kubernetes_cpuset"))
    with pytest.raises(NanoConfigError) as caught:
        given_shares(machine, ((4, 5), (5, 4, 6), (0, 99)))
    assert str(caught.value).splitlines() == [
        "cpu_for_each_process[2]=[0, 99]: no CPU is left without 99 (no such CPU), "
        "0 (not in this process's affinity mask); this process may use CPUs 4-7,20-23 of 32. Use some of these.",
        "cpu_for_each_process has CPU 4-5 in more than one list: a CPU computes for one process. "
        "Remove it from the others.",
    ]


def test_a_process_sees_its_own_cpus_and_its_part_of_the_quota():
    machine = built([[8]], quota=5.0)
    first, _ = partition(machine, 2)
    seen = restricted(machine, first, 2)
    assert (seen.allowed, seen.quota, seen.num_threads) == ((0, 1), 2.5, 2)
    assert seen.logical_cpus == machine.logical_cpus
    assert machine.allowed == tuple(range(8))


def test_given_cpus_beyond_the_quota_get_no_more_threads_than_it_pays_for():
    machine = built([[8]], quota=4.0)
    shares = given_shares(machine, (range(4), range(4, 8)))
    assert [restricted(machine, share, 2).num_threads for share in shares] == [2, 2]


@given(machines(most_cores=24))
def test_shares_of_a_count_that_is_tried_leave_no_core_idle_and_cross_no_node(machine):
    counts = process_counts(machine)
    assert counts[0] == 1
    assert all(2 * fewer <= more for fewer, more in pairwise(counts))
    usable = usable_cores(machine, 1)
    node = {cpu.id: cpu.numa_node for cpu in usable}
    for count in counts[1:]:
        shares = partition(machine, count)
        assert sum(len(share.cpus) for share in shares) == min(len(usable), machine.num_threads)
        if machine.num_threads >= len(usable):  # a quota belongs to no node
            assert all(len({node[cpu] for cpu in share.cpus}) == 1 for share in shares)
