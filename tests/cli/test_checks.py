"""Checks of threads, memory and CPUs, on a machine with 16 cores."""

import dataclasses

import pytest

from nano_loop.cli.diagnosis import findings_of
from nano_loop.config.exports import EXPORTS, Exports

QUOTA = {"/sys/fs/cgroup/cpu.max": "200000 100000\n"}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
@pytest.mark.parametrize(
    ("value", "ending", "words"),
    [
        ("1", "low", "15 cores stay idle"),
        ("15,2", "low", "1 core stays idle"),
        ("32", "high", "wait for each other"),
        ("many", "unreadable", "no number"),
        ("0", "unreadable", "no number"),
        ("", "unreadable", "no number"),
    ],
)
def test_wrong_number_of_threads_hurts(only, name, value, ending, words):
    finding = only(environ={name: value})
    assert finding.id == f"{name.lower().replace('_', '-')}-{ending}"
    assert finding.hurts
    assert f"{name}={value}" in finding.what
    assert words in finding.why
    assert "16" in finding.advice


@pytest.mark.parametrize("value", ["16", " 16 ", "16,1"])
def test_right_number_of_threads_is_clean(found, value):
    assert found(environ={"OMP_NUM_THREADS": value, "MKL_NUM_THREADS": value}) == []


def test_quota_that_torch_does_not_read_hurts(found):
    first, second = found(files=QUOTA)
    assert (first.id, first.hurts) == ("quota-threads", True)
    assert "2 of 16 cores" in first.what
    assert second.id == "quota"
    assert [finding.id for finding in found(files=QUOTA, environ={"OMP_NUM_THREADS": "2"})] == ["quota"]


@pytest.mark.parametrize(
    "environ",
    [
        {"OMP_PROC_BIND": "CLOSE"},
        {"OMP_PROC_BIND": "true"},
        {"OMP_PLACES": "cores"},
        {"GOMP_CPU_AFFINITY": "0-15"},
    ],
    ids=str,
)
def test_binding_by_openmp_hurts(only, environ):
    finding = only(environ=environ)
    assert (finding.id, finding.hurts) == ("openmp-binding", True)
    assert next(iter(environ)) in finding.what


@pytest.mark.parametrize(
    "environ",
    [
        {"OMP_PROC_BIND": "False"},
        {"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"},
        {"KMP_AFFINITY": "granularity=fine,compact,1,0"},
        {"GOMP_CPU_AFFINITY": ""},
    ],
    ids=str,
)
def test_binding_without_effect_is_clean(found, environ):
    assert found(environ=environ) == []


def test_intels_binding_hurts_where_its_openmp_is_loaded(only):
    files = {"/proc/self/maps": "7f00-7f01 r-xp 0 08:01 1    /intel/lib/libiomp5.so\n"}
    assert only(environ={"KMP_AFFINITY": "compact"}, files=files).id == "openmp-binding"


def test_what_env_exports_is_clean(found):
    after = {"OMP_NUM_THREADS": "16", "MALLOC_TOP_PAD_": "67108864"}
    note = Exports(dict.fromkeys(after), after).encoded()
    assert found(environ={**after, EXPORTS: note}) == []


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


@pytest.mark.parametrize("limit", ["max", "9223372036854771712", "99999999999999"])
def test_limit_that_limits_nothing_is_clean(found, limit):
    assert found(files={"/sys/fs/cgroup/memory.max": f"{limit}\n"}) == []
