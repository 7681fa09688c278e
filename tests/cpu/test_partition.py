"""Dividing cores among processes: even shares that straddle nothing they need not, the user's own, and refusals."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_loop.cpu import LogicalCpu, Machine, Share, given_shares, partition, read_machine, restricted
from nano_loop.errors import NanoConfigError, NanoWarning


def machine_of(*cpus, **fields):
    defaults = {"name": "test", "architecture": "x86_64", "allowed": tuple(cpu.id for cpu in cpus)}
    return Machine(logical_cpus=cpus, **{**defaults, **fields})


def built(*nodes, **fields):
    """A machine without SMT, from the core counts of each node's last-level caches: ``[4, 4], [4, 4]``."""
    cpus = []
    for node, caches in enumerate(nodes):
        for count in caches:
            first = len(cpus)
            cpus += [LogicalCpu(i, i, numa_node=node, last_level_cache=first) for i in range(first, first + count)]
    return machine_of(*cpus, **fields)


def cpus_of(shares):
    return [list(share.cpus) for share in shares]


def ids(first, last):
    return list(range(first, last + 1))


# --- on recorded machines ---


def test_two_sockets_are_a_process_each(recorded):
    shares = partition(read_machine(recorded("xeon_4309y_two_sockets")), 2)
    assert shares == (
        Share(tuple(range(8)), tuple(range(16, 24))),
        Share(tuple(range(8, 16)), tuple(range(24, 32))),
    )


def test_siblings_that_are_adjacent_go_to_the_loaders_of_their_cores(recorded):
    shares = partition(read_machine(recorded("epyc_9v74_azure")), 4)
    assert shares[0] == Share((0, 2, 4, 6), (1, 3, 5, 7))
    assert shares[3] == Share((24, 26, 28, 30), (25, 27, 29, 31))


def test_a_machine_without_siblings_loads_where_it_computes(recorded):
    shares = partition(read_machine(recorded("graviton3")), 2)
    assert shares == (Share(tuple(range(8)), tuple(range(8))), Share(tuple(range(8, 16)), tuple(range(8, 16))))


def test_a_cpuset_is_divided_with_its_siblings(recorded):
    shares = partition(read_machine(recorded("kubernetes_cpuset")), 2)
    assert shares == (Share((4, 5), (20, 21)), Share((6, 7), (22, 23)))


@pytest.mark.parametrize(
    ("machine", "count", "cpus"),
    [
        ("docker_quota_v2", 1, [[0, 2]]),
        ("docker_quota_v2", 2, [[0], [16]]),
        ("docker_quota_v1", 3, [[0], [1], [2]]),
        ("systemd_nested_quota", 2, [[0, 1], [2, 3]]),
    ],
)
def test_a_quota_bounds_the_cores_that_are_divided(recorded, machine, count, cpus):
    assert cpus_of(partition(read_machine(recorded(machine)), count)) == cpus


def test_one_process_gets_all_cores(recorded):
    (share,) = partition(read_machine(recorded("xeon_4309y_two_sockets")), 1)
    assert share == Share(tuple(range(16)), tuple(range(16, 32)))


def test_a_core_of_which_one_sibling_is_allowed_is_computed_on(recorded):
    machine = read_machine(recorded("epyc_9v74_azure"), affinity=[1, 2, 3, 5, 6, 7])
    assert partition(machine, 2) == (Share((1, 2), (3,)), Share((5, 6), (7,)))


# --- boundaries ---


@pytest.mark.parametrize(
    ("machine", "count", "cpus"),
    [
        (built([3], [3]), 2, [ids(0, 2), ids(3, 5)]),
        (built([5], [5]), 4, [[0, 1], [2, 3], [5, 6], [7, 8]]),
        (built([3, 3]), 2, [ids(0, 2), ids(3, 5)]),
        (built([5, 5]), 4, [[0, 1], [2, 3], [5, 6], [7, 8]]),
        (built([3, 3], [3, 3]), 4, [ids(0, 2), ids(3, 5), ids(6, 8), ids(9, 11)]),
        # No cache holds a share of 6: the nodes do.
        (built([4, 4], [4, 4]), 2, [ids(0, 7), ids(8, 15)]),
        (built([4, 4, 5], [4, 4, 5]), 4, [ids(0, 5), ids(6, 11), ids(13, 18), ids(19, 24)]),
        # No node holds two shares of 5: one straddles, and the neighbours go together.
        (built([8], [8]), 3, [ids(0, 4), ids(5, 9), ids(10, 14)]),
        (built([2], [2], [2]), 1, [ids(0, 5)]),
    ],
)
def test_shares_straddle_no_boundary_that_they_can_avoid(machine, count, cpus):
    assert cpus_of(partition(machine, count)) == cpus


@pytest.mark.parametrize(
    ("machine", "count", "cpus"),
    [
        (built([3], [3], quota=4), 2, [[0, 1], [3, 4]]),
        (built([2], [4], quota=3), 1, [[2, 3, 4]]),
        (built([8, 8], quota=8.9), 2, [ids(0, 3), ids(8, 11)]),
        (built([4, 4, 4, 4], quota=16), 2, [ids(0, 7), ids(8, 15)]),
        (built([8], [8], quota=8), 2, [ids(0, 3), ids(4, 7)]),
    ],
)
def test_the_cores_of_a_quota_are_chosen_so_that_shares_straddle_nothing(machine, count, cpus):
    assert cpus_of(partition(machine, count)) == cpus


@pytest.mark.parametrize(
    ("machine", "count", "cpus"),
    [
        (built([8], [8]), 6, [[0, 1], [2, 3], [4, 5], [8, 9], [10, 11], [12, 13]]),
        (built([4, 4], [4, 4]), 6, [[0, 1], [2, 3], [4, 5], [8, 9], [10, 11], [12, 13]]),
    ],
)
def test_processes_are_spread_evenly_over_the_nodes(machine, count, cpus):
    assert cpus_of(partition(machine, count)) == cpus


def test_one_cache_over_two_nodes_does_not_hide_their_boundary():
    # Intel's sub-NUMA clusters.
    cpus = [LogicalCpu(i, i, numa_node=i // 3, last_level_cache=0) for i in range(6)]
    assert cpus_of(partition(machine_of(*cpus, quota=4), 2)) == [[0, 1], [3, 4]]


# --- hybrid machines ---


@pytest.mark.parametrize(
    ("count", "cpus"),
    [
        (1, [[0, 2, 4, 6]]),
        (2, [[0, 2], [4, 6]]),
        (4, [[0], [2], [4], [6]]),
        (6, [[0, 2], [4, 6], [8, 9], [10, 11], [12, 13], [14, 15]]),
    ],
)
def test_efficiency_cores_are_used_only_where_performance_cores_do_not_suffice(recorded, count, cpus):
    assert cpus_of(partition(read_machine(recorded("core_i7_1260p")), count)) == cpus


def test_a_process_bound_to_efficiency_cores_divides_these(recorded):
    machine = read_machine(recorded("core_i7_1260p"), affinity=range(8, 16))
    assert cpus_of(partition(machine, 2)) == [ids(8, 11), ids(12, 15)]


# --- refusals ---


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (
            built([64], allowed=(0, 1, 2, 3, 4), quota=4.5),
            "num_processes=8: it needs 8 physical cores, and this process may use 4 (CPUs 0-4 of 64, quota 4.5). "
            "Lower num_processes, or widen the CPU affinity or the quota.",
        ),
        (
            built([4]),
            "num_processes=8: it needs 8 physical cores, and this process may use 4 (CPUs 0-3 of 4). "
            "Lower num_processes, or widen the CPU affinity.",
        ),
    ],
)
def test_more_processes_than_cores_are_refused_with_the_numbers(machine, message):
    with pytest.raises(NanoConfigError) as caught:
        partition(machine, 8)
    assert str(caught.value) == message


def test_siblings_are_no_cores_of_their_own(recorded):
    machine = read_machine(recorded("xeon_4309y_two_sockets"))
    assert len(partition(machine, 16)) == 16
    with pytest.raises(NanoConfigError, match="may use 16 "):
        partition(machine, 17)


# --- any machine ---


@st.composite
def machines(draw, most_cores):
    """Machines whose caches lie inside nodes, with or without siblings, hybrid or not, and a part that is allowed."""
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
    """Try every way to choose `count` disjoint sets of `size` cores, each of one place."""
    if count == 0:
        return True
    for chosen in combinations(cores, size):
        if len(set(map(place, chosen))) == 1:
            # Sets are chosen by their first core, in order, so that each choice is tried once.
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


@pytest.mark.parametrize(
    ("lists", "shares"),
    [
        # One thread of each core: the free siblings load.
        (((0, 1), (2, 3)), (Share((0, 1), (16, 17)), Share((2, 3), (18, 19)))),
        # Both: the first given computes.
        (((16, 0, 1),), (Share((16, 1), (0,)),)),
        (((0, 1, 16, 17),), (Share((0, 1), (16, 17)),)),
        # A sibling that another list claims does not load.
        (((0, 1), (16,)), (Share((0, 1), (17,)), Share((16,), (16,)))),
        (((3, 0, 3, 0),), (Share((0, 3), (16, 19)),)),
    ],
)
def test_the_users_lists_become_shares(recorded, lists, shares):
    assert given_shares(read_machine(recorded("xeon_4309y_two_sockets")), lists) == shares


def test_siblings_that_are_not_allowed_do_not_load(recorded):
    machine = read_machine(recorded("xeon_4309y_two_sockets"), affinity=range(16))
    assert given_shares(machine, ((0, 1),)) == (Share((0, 1), (0, 1)),)


def test_cpus_that_cannot_be_used_are_left_out_with_one_warning_that_names_them(recorded):
    machine = read_machine(recorded("kubernetes_cpuset"))
    with pytest.warns(NanoWarning) as caught:
        shares = given_shares(machine, ((4, 64, 0), (5, 65, 1)))
    assert cpus_of(shares) == [[4], [5]]
    assert [str(warning.message) for warning in caught] == [
        "cpu_for_each_process: left out 64-65 (no such CPU), 0-1 (not in this process's affinity mask); "
        "this process may use CPUs 4-7,20-23 of 32. Take them out of the lists."
    ]
    assert caught[0].filename == __file__


def test_all_that_is_wrong_with_the_lists_is_said_at_once(recorded):
    machine = read_machine(recorded("kubernetes_cpuset"))
    with pytest.raises(NanoConfigError) as caught:
        given_shares(machine, ((4, 5), (5, 4, 6), (0, 99)))
    assert str(caught.value).splitlines() == [
        "cpu_for_each_process[2]=[0, 99]: no CPU is left without 99 (no such CPU), "
        "0 (not in this process's affinity mask); this process may use CPUs 4-7,20-23 of 32. Name some of those.",
        "cpu_for_each_process has CPU 4-5 in more than one list: a CPU computes for one process. "
        "Take it out of the others.",
    ]


def test_an_empty_list_is_refused(recorded):
    with pytest.raises(NanoConfigError, match=r"cpu_for_each_process\[1\]=\[\]"):
        given_shares(read_machine(recorded("graviton3")), ((0,), ()))


# --- what one process sees ---


def test_a_process_sees_its_own_cpus_and_its_part_of_the_quota():
    machine = built([8], quota=5.0)
    first, _ = partition(machine, 2)
    seen = restricted(machine, first, 2)
    assert (seen.allowed, seen.quota, seen.num_threads) == ((0, 1), 2.5, 2)
    assert seen.logical_cpus == machine.logical_cpus
    assert machine.allowed == tuple(range(8))


def test_without_a_quota_a_process_sees_none():
    machine = built([4])
    assert restricted(machine, partition(machine, 2)[1], 2).quota is None


def test_given_cpus_beyond_the_quota_get_no_more_threads_than_it_pays_for():
    machine = built([8], quota=4.0)
    shares = given_shares(machine, (range(4), range(4, 8)))
    assert [restricted(machine, share, 2).num_threads for share in shares] == [2, 2]
