"""Findings about threads, on a machine with 16 cores."""

import pytest

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
