"""Findings about environment variables."""

import pytest

SLOW = {
    "ATEN_CPU_CAPABILITY": ("default", "avx512"),
    "ONEDNN_MAX_CPU_ISA": ("AVX2", "ALL"),
    "DNNL_MAX_CPU_ISA": ("avx512_core_vnni", "AVX512_CORE_AMX"),
    "ONEDNN_VERBOSE": ("1", "0"),
    "DNNL_VERBOSE": ("2", "none"),
    "MKL_VERBOSE": ("1", "0"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "OFF"),
    "TORCH_COMPILE_DEBUG": ("1", "0"),
    "TORCHDYNAMO_DISABLE": ("1", "0"),
    "MALLOC_PERTURB_": ("165", ""),
    "PYTHONMALLOC": ("malloc_debug", "malloc"),
}


@pytest.mark.parametrize("name", SLOW)
def test_variable_for_debugging_hurts(only, found, name):
    bad, good = SLOW[name]
    finding = only(environ={name: bad})
    assert (finding.id, finding.hurts) == ("slow-variable", True)
    assert finding.what == f"{name}={bad} is set"
    assert found(environ={name: good}) == []


def test_limit_names_what_is_lost(only):
    assert "avx512_bf16 and avx512f, which" in only(environ={"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}).why
    assert "use avx512_bf16, which" in only(environ={"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}).why


def test_misspelled_option_hurts_and_the_right_name_is_said(only):
    finding = only(environ={"NANO_LOOP_PRECISON": "bf16"})
    assert (finding.id, finding.hurts) == ("refused-option", True)
    assert "Write NANO_LOOP_PRECISION" in finding.what


def test_value_that_is_not_allowed_hurts(found):
    first, second = found(environ={"NANO_LOOP_PRECISION": "fp8", "NANO_LOOP_TIMEOUT": "-1"})
    assert {first.id, second.id} == {"refused-option"}
    assert "NANO_LOOP_PRECISION=fp8: " in first.what
    assert "NANO_LOOP_TIMEOUT=-1: " in second.what


@pytest.mark.parametrize(
    "environ", [{"MALLOC_TRIM_THRESHOLD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=1"}], ids=str
)
def test_settings_of_glibc_are_a_note(only, environ):
    finding = only(environ=environ)
    assert (finding.id, finding.hurts) == ("malloc-settings", False)


@pytest.mark.parametrize("value", ["1", "2"])
def test_few_arenas_are_a_note(only, value):
    finding = only(environ={"MALLOC_ARENA_MAX": value})
    assert (finding.id, finding.hurts) == ("malloc-arena-max", False)
