"""Findings about allocators and OpenMP runtimes."""

import pytest


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
