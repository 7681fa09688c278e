"""What `doctor` finds: nothing on a machine without faults, and of faults what hurts first."""

import pytest

from nano_loop.cli import checks, software_checks
from nano_loop.cli.diagnosis import CHECKS
from nano_loop.cli.inspected import Kernels

CLEAN = {
    "nothing changed": {},
    "the whole machine by its affinity mask": {"affinity": frozenset(range(32))},
    "ARM without AVX2": {"machine": "graviton3"},
    "quota of all cores": {"files": {"/sys/fs/cgroup/cpu.max": "1600000 100000\n"}},
    "unknown libraries": {"environ": {"LD_PRELOAD": "libjemalloc.so.2"}, "files": {"/proc/self/maps": ""}},
    "unknown memory": {"files": {"/proc/meminfo": "damaged"}, "shared": None},
    "IPEX with its torch": {"packages": {"torch": "2.8.0+cpu", "intel-extension-for-pytorch": "2.8.0+cpu"}},
    "torchrun's number of threads": {"environ": {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}},
    "options": {"environ": {"NANO_LOOP_PRECISION": "bf16"}},
    "other tunables of glibc": {"environ": {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}},
    "many arenas": {"environ": {"MALLOC_ARENA_MAX": "32"}},
    "kernels of the package": {"kernels": Kernels("v4", "in the package")},
}
JEMALLOC = "/usr/lib/libjemalloc.so.2"
SHORT = {"/proc/meminfo": "MemTotal:  65859580 kB\nMemAvailable:  2000000 kB\n"}
IPEX = {"torch": "2.13.0+cpu", "intel-extension-for-pytorch": "2.8.0"}
TORCH = {"packages": {"torch": "2.7.1+cpu"}, "requirements": {"nano-loop": ("torch>=2.8", "numpy>=1.26")}}
#: What is changed on the machine, whether it hurts, and words of what the finding, its reason and its advice say.
FAULTS = {
    "affinity": ({"affinity": frozenset(range(4))}, False, "CPUs 4-31", "2 cores", ""),
    "cpuset": ({"files": {"/sys/fs/cgroup/cpuset.cpus.effective": "0-7\n"}}, False, "CPUs 8-31", "4 cores", ""),
    "preload-missing": ({"environ": {"LD_PRELOAD": JEMALLOC}}, True, JEMALLOC, "", ""),
    "shared-memory": ({"shared": 64 << 20}, True, "64 MiB", "", "--shm-size"),
    "memory-short": ({"files": SHORT}, True, "1.9 GiB of 62.8 GiB", "", ""),
    "memory-limit": (
        *({"files": {"/sys/fs/cgroup/memory.max": "8589934592\n"}}, False),
        *("8.0 GiB, and the machine has 62.8 GiB", "", ""),
    ),
    "no-torch": ({"packages": {"nano-loop": "0.1.0"}}, True, "", "", ""),
    "ipex-torch": ({"packages": IPEX}, True, "IPEX 2.8.0 and torch 2.13.0+cpu", "", "torch==2.8.*"),
    "no-kernels": (
        *({"kernels": Kernels(None, reason="no C compiler was found")}, True),
        *("no C compiler was found", "longer", "Install gcc"),
    ),
    "damaged-kernels": (
        *({"kernels": Kernels("v4", "in the package", "norms.so is cut off, at byte 9")}, True),
        *("norms.so is cut off, at byte 9", "longer", "pip install --force-reinstall"),
    ),
    "requirement": (TORCH, True, "nano-loop needs torch>=2.8, and 2.7.1+cpu is installed", "", ""),
}


@pytest.mark.parametrize("name", CLEAN)
def test_machine_without_a_fault_has_no_findings(found, name):
    assert found(**CLEAN[name]) == []


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_and_explained(only, name):
    change, hurts, what, why, advice = FAULTS[name]
    finding = only(**change)
    assert (finding.id, finding.hurts) == (name, hurts)
    assert what in finding.what
    assert why in finding.why
    assert advice in finding.advice


def test_what_hurts_comes_first(found):
    several = found(environ={"MALLOC_ARENA_MAX": "1", "MKL_VERBOSE": "1"}, packages={})
    assert [finding.hurts for finding in several] == [True, True, False]


def test_every_check_is_listed():
    public = [
        value
        for module in (checks, software_checks)
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and "Iterator[Finding]" in str(value.__annotations__)
    ]
    assert {*public} == {*CHECKS}
