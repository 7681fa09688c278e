"""Checks of variables, libraries, kernels and packages."""

import pytest

from nano_loop.cli.diagnosis import findings_of
from nano_loop.cli.inspected import CacheFolder, Kernels, inspect_system

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


def maps(*libraries):
    lines = [f"7f00-7f01 r-xp 00000000 08:01 1    {each}\n" for each in ("/usr/lib/libc.so.6", *libraries)]
    return {"/proc/self/maps": "".join(lines) + "7f02-7f03 rw-p 0 00:00 0 [heap]\n"}


@pytest.mark.parametrize("preload", ["libjemalloc.so.2", "/usr/lib/libjemalloc.so", " libjemalloc.so.2 :", ""])
def test_preloaded_library_that_is_there_is_clean(found, preload):
    assert found(environ={"LD_PRELOAD": preload}, files=maps("/usr/lib/libjemalloc.so.2")) == []


def test_link_of_another_name_is_clean(found, tmp_path):
    link = tmp_path / "allocator.so"
    link.symlink_to(tmp_path / "libjemalloc.so.2")
    assert found(environ={"LD_PRELOAD": str(link)}, files=maps("/usr/lib/libjemalloc.so.2")) == []


@pytest.mark.parametrize("other", ["libiomp5.so", "libomp.so.5", "libomp-a1b2.so"])
def test_two_openmp_runtimes_hurt(only, other):
    finding = only(files=maps("/site/torch/lib/libgomp-a34b3233.so.1", f"/intel/lib/{other}"))
    assert (finding.id, finding.hurts) == ("two-openmp", True)
    assert "GNU" in finding.what


def test_preloaded_openmp_serves_the_other_ones_programs(found):
    files = maps("/site/torch/lib/libgomp-a34b3233.so.1", "/intel/lib/libiomp5.so")
    assert found(files=files, environ={"LD_PRELOAD": "/intel/lib/libiomp5.so"}) == []


def test_one_openmp_runtime_in_two_files_is_clean(found):
    assert found(files=maps("/a/libgomp.so.1", "/b/libgomp-a34b3233.so.1.0.0", "/b/libgompertz.so")) == []


def test_two_allocators_hurt(only):
    finding = only(files=maps("/usr/lib/libjemalloc.so.2", "/usr/lib/libtcmalloc_minimal.so.4"))
    assert (finding.id, finding.hurts) == ("two-allocators", True)
    assert "jemalloc and tcmalloc" in finding.what


COMPILED, PACKED = Kernels("compile", "compiled at first use"), Kernels("v3", "in the package")
OPEN = CacheFolder("/cache", True, True)


@pytest.mark.parametrize("kernels", [COMPILED, PACKED])
def test_nothing_is_lost_with_kernels_and_a_place_for_them(found, kernels):
    assert found(kernels=kernels, cache=OPEN) == []


@pytest.mark.parametrize(
    ("change", "name", "hurts"),
    [
        ({"kernels": Kernels(None, reason="no C compiler was found")}, "no-kernels", True),
        ({"kernels": Kernels("v4", "in the package", "norms.so is cut off")}, "damaged-kernels", True),
        ({"kernels": Kernels(None), "environ": {"NANO_LOOP_KERNELS": "off"}}, "kernels-off", False),
        ({"kernels": COMPILED, "cache": CacheFolder("/cache", False, True)}, "cache-folder", True),
        ({"kernels": PACKED, "cache": CacheFolder("/cache", False, True)}, "cache-folder", False),
        ({"kernels": PACKED, "cache": CacheFolder("", False, True)}, "cache-folder", False),
        ({"kernels": COMPILED, "cache": CacheFolder("/cache", True, False)}, "cache-noexec", True),
    ],
)
def test_what_is_lost_is_found(only, change, name, hurts):
    finding = only(**change)
    assert (finding.id, finding.hurts) == (name, hurts)


def test_user_without_a_home_is_not_told_to_change_it(only):
    assert only(kernels=PACKED, cache=CacheFolder("", False, True)).advice.startswith("Set XDG_CACHE_HOME")


def test_kernels_of_the_package_may_be_where_no_library_is_loaded_from(found):
    assert found(kernels=PACKED, cache=CacheFolder("/cache", True, False)) == []


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
def test_malicious_release_hurts(only, name):
    finding = only(packages={"torch": "2.13.0", name: "2.6.2"})
    assert (finding.id, finding.hurts) == ("malicious-lightning", True)
    assert f"{name} 2.6.2" in finding.what


@pytest.mark.parametrize(
    "requirement",
    ["torch<4.0,>=2.1", 'torch==2.8.0; extra == "ipex"', "torch (damaged", "lightning_fabric>=2", "Torch"],
)
def test_other_requirements_are_clean(found, requirement):
    assert found(requirements={"nano-loop": (requirement,)}) == []


def test_name_with_an_underscore_is_the_same_package(only):
    assert only(requirements={"lightning": ("Lightning_Fabric>=3",)}).id == "requirement"


def test_packages_of_this_environment_fit_each_other():
    ids = {finding.id for finding in findings_of(inspect_system())}
    assert not ids & {"no-torch", "ipex-torch", "malicious-lightning", "requirement"}


def test_build_for_gpus_that_are_not_there_is_a_note(only):
    finding = only(unused_cuda="12.8")
    assert (finding.id, finding.hurts) == ("cuda-torch", False)
    assert "CUDA 12.8" in finding.what


@pytest.mark.parametrize(("version", "is_old"), [("2.8.0+cpu", True), ("2.9.1", False), ("3.0a0", False)])
def test_torch_without_its_kernels_is_a_note(found, version, is_old):
    assert [finding.id for finding in found(packages={"torch": version})] == ["old-torch"] * is_old
