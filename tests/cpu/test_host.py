"""Systems without /proc: macOS by its sysctl, others by their counts."""

import subprocess
from pathlib import Path

import psutil
import pytest

from nano_loop.cpu import Host, read_machine
from nano_loop.cpu import host as host_module
from nano_loop.cpu.host import live_host, parse_sysctl

M4_PRO = Path(__file__).parent / "machines" / "apple_m4_pro.sysctl"


@pytest.fixture
def mac():
    sysctl = parse_sysctl(M4_PRO.read_text(encoding="utf-8"))
    return Host(architecture="arm64", logical_count=14, physical_count=14, sysctl=sysctl)


def test_a_mac_is_read_without_proc(tmp_path, mac):
    machine = read_machine(tmp_path, host=mac)
    assert (machine.name, machine.architecture, machine.num_threads) == ("Apple M4 Pro", "arm64", 14)
    assert machine.quota is None
    assert machine.has_fast_bf16


def test_a_macs_features_have_the_names_that_linux_gives_them(tmp_path, mac):
    sets = read_machine(tmp_path, host=mac).instruction_sets
    assert {"asimd", "asimddp", "asimdhp", "atomics", "bf16", "i8mm", "sme2"} <= sets
    assert not {"ssbs", "specres"} & sets, "FEAT_SSBS and FEAT_SPECRES are 0"


def test_a_macs_performance_cores_come_first(tmp_path, mac):
    cpus = read_machine(tmp_path, host=mac).logical_cpus
    assert [cpu.core_kind for cpu in cpus] == ["performance"] * 10 + ["efficiency"] * 4
    assert [cpu.last_level_cache for cpu in cpus] == [0] * 5 + [5] * 5 + [10] * 4


def test_a_mac_with_one_kind_of_core_has_no_kinds(tmp_path):
    host = Host(architecture="arm64", sysctl={"hw.perflevel0.logicalcpu": "4"})
    assert {cpu.core_kind for cpu in read_machine(tmp_path, host=host).logical_cpus} == {None}


def test_an_intel_mac_is_read_by_its_feature_lists(tmp_path):
    sysctl = {
        "machdep.cpu.brand_string": "Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz",
        "machdep.cpu.features": "FPU SSE4.1 SSE4.2 AVX1.0 FMA",
        "machdep.cpu.leaf7_features": "AVX2 BMI1",
    }
    host = Host(architecture="x86_64", logical_count=16, physical_count=8, sysctl=sysctl)
    machine = read_machine(tmp_path, host=host)
    assert (machine.name, machine.num_threads) == ("Intel Core i9-9880H", 8)
    assert machine.instruction_sets == {"fpu", "sse4_1", "sse4_2", "avx", "fma", "avx2", "bmi1"}


@pytest.mark.parametrize(
    ("logical", "physical", "cores"),
    [
        (4, 4, ((0,), (1,), (2,), (3,))),
        (4, 2, ((0, 1), (2, 3))),
        (4, 3, ((0, 1), (2,), (3,))),
        (4, None, ((0,), (1,), (2,), (3,))),
        (4, 1, ((0,), (1,), (2,), (3,))),
        (2, 8, ((0,), (1,))),
        (None, None, ((0,),)),
    ],
)
def test_counts_alone_give_cores_and_siblings(tmp_path, logical, physical, cores):
    host = Host(architecture="x86_64", logical_count=logical, physical_count=physical)
    machine = read_machine(tmp_path, host=host)
    assert machine.physical_cores == cores
    assert (machine.name, machine.architecture) == ("x86_64", "x86_64")


def test_a_missing_sysctl_does_no_harm(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("/usr/sbin/sysctl")

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(host_module.platform, "system", lambda: "Darwin")
    assert live_host().sysctl == {}


def test_a_live_mac_is_asked_once_for_all_that_counts(monkeypatch):
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="hw.ncpu: 14\nno colon here\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(host_module.platform, "system", lambda: "Darwin")
    assert live_host().sysctl == {"hw.ncpu": "14"}
    assert commands == [["/usr/sbin/sysctl", "hw", "machdep.cpu"]]


def test_a_system_without_masks_is_counted_by_psutil(monkeypatch):
    monkeypatch.delattr(host_module.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else None)
    assert (live_host().logical_count, live_host().physical_count) == (8, None)
