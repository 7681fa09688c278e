"""Findings about the CPU, and about what narrows it."""

import dataclasses

import pytest

from nano_loop.cli.findings import findings_of


def with_instruction_sets(inspected, *sets):
    return dataclasses.replace(
        inspected, machine=dataclasses.replace(inspected.machine, instruction_sets=frozenset(sets))
    )


def test_cpu_without_avx2_hurts(inspect):
    first, second = findings_of(with_instruction_sets(inspect(), "sse4_2"))
    assert (first.id, first.hurts) == ("no-avx2", True)
    assert "EPYC" in first.what
    assert second.id == "no-bf16"


def test_cpu_without_bf16_instructions_is_a_note(inspect):
    (finding,) = findings_of(with_instruction_sets(inspect(), "avx2", "avx512f"))
    assert (finding.id, finding.hurts) == ("no-bf16", False)


@pytest.mark.parametrize("sets", [("avx2", "amx_tile", "amx_bf16"), ("avx2", "avx512_bf16")])
def test_cpu_with_bf16_instructions_is_clean(inspect, sets):
    assert findings_of(with_instruction_sets(inspect(), *sets)) == []


def test_unknown_instruction_sets_are_no_finding(inspect):
    assert findings_of(with_instruction_sets(inspect())) == []


def test_mask_that_follows_the_cpuset_is_found_once(only):
    change = {"files": {"/sys/fs/cgroup/cpuset.cpus.effective": "0-7\n"}, "affinity": frozenset(range(8))}
    assert only(**change).id == "cpuset"


def test_quota_says_how_many_threads_it_leaves(only):
    files = {"/sys/fs/cgroup/cpu.max": "250000 100000\n"}
    finding = only(files=files, environ={"OMP_NUM_THREADS": "2"})
    assert (finding.id, finding.hurts) == ("quota", False)
    assert "quota is 2.5 CPUs" in finding.what
    assert "16 cores" in finding.what
    assert finding.why.startswith("2 compute threads")
