"""What is lost without kernels in C, or where they and measurements cannot be kept."""

import os

import pytest

from nano_loop.cli.cache_inspected import CacheFolder, inspect_cache
from nano_loop.cli.kernels_inspected import Kernels

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


# --- the folder itself ---


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_folder_that_is_not_there_yet_is_not_made(home):
    assert inspect_cache() == CacheFolder(str(home / "cache/nano_loop"), True, True)
    assert [*home.iterdir()] == []


def test_folder_that_others_may_write_to_is_not_for_this_user_alone(home):
    folder = home / "cache/nano_loop"
    folder.mkdir(parents=True, mode=0o700)
    assert inspect_cache().is_writable
    folder.chmod(0o777)
    assert not inspect_cache().is_writable


def test_read_only_folder_is_found(home, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a file system that is mounted so, for root too
    assert not inspect_cache().is_writable


def test_file_system_from_which_no_library_is_loaded_is_found(home, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*[0] * 8, os.ST_NOEXEC, 255)))
    assert not inspect_cache().is_executable


def test_user_without_a_home_has_no_folder(monkeypatch):
    monkeypatch.setattr("nano_loop.cli.cache_inspected.cache_path", lambda: None)
    assert inspect_cache() == CacheFolder("", False, True)
