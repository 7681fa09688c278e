"""Properties derived from a machine: the order of its cores, useful numbers of threads, fast bf16, JSON."""

import json

import pytest

from nano_loop.cpu import LogicalCpu, read_machine

from .recording import machine_of


def test_cores_stand_in_the_order_of_their_nodes():
    # Dell's servers number their CPUs alternately across sockets.
    cpus = [LogicalCpu(i, i, package=i % 2, numa_node=i % 2, last_level_cache=i % 2) for i in range(6)]
    assert machine_of(*cpus).physical_cores == ((0,), (2,), (4,), (1,), (3,), (5,))


def test_cores_of_one_node_stand_in_the_order_of_their_caches():
    cpus = [LogicalCpu(i, i, last_level_cache=i % 2) for i in range(4)]
    assert machine_of(*cpus).physical_cores == ((0,), (2,), (1,), (3,))


@pytest.mark.parametrize(
    ("sets", "fast"),
    [
        ({"avx512f", "avx512_bf16"}, True),
        ({"amx_bf16", "amx_tile"}, True),
        ({"amx_bf16"}, False),
        ({"asimd", "bf16"}, True),
        ({"avx512f", "avx512_vnni", "avx512_fp16"}, False),
        (set(), False),
    ],
)
def test_bf16_is_fast_with_instructions_of_its_own(sets, fast):
    assert machine_of(LogicalCpu(0, 0), instruction_sets=frozenset(sets)).has_fast_bf16 is fast


def test_a_machine_goes_through_json(recorded):
    machine = read_machine(recorded("docker_quota_v2"))
    held = json.loads(json.dumps(machine.as_dict()))
    assert held == machine.as_dict()
    assert (held["name"], held["quota"], held["num_threads"]) == ("AMD EPYC 9V74", 2.5, 2)
    assert held["logical_cpus"][3]["physical_core"] == 2
    assert held["physical_cores"][0] == [0, 1]
