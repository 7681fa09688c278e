"""`doctor` finds nothing on a machine without faults, and each fault with its reason and its advice."""

import ast
import re
from pathlib import Path

import pytest

from nano_loop.cli import doctor_checks
from nano_loop.cli.app import app
from nano_loop.cli.doctor import CHECKS
from nano_loop.cli.inspected import CacheFolder, Kernels

INTEL = "/intel/lib/libiomp5.so"
COMPILED, PACKED = Kernels("compile", "compiled at first use"), Kernels("v3", "in the package")
NO_KERNELS, CUT_OFF = Kernels(None, reason="no C compiler was found"), "norms.so is truncated at byte 9"
OPEN, CLOSED, NO_HOME = (
    CacheFolder("/cache", True, True),
    CacheFolder("/cache", False, True),
    CacheFolder("", False, True),
)
MISSING = CacheFolder("/nonexistent/.cache/nano_loop", False, True, is_there=False)
NOEXEC = CacheFolder("/cache", True, False)


def environ(**variables):
    return {"environ": variables}


def file(path, text):
    return {"files": {path: text}}


def cgroup(name, text):
    return file(f"/sys/fs/cgroup/{name}", f"{text}\n")


#: By variable: a value that slows training down, and one that does not.
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
#: Changes of the recorded machine, which has 16 cores, without a finding.
CLEAN = [
    {},
    {"affinity": frozenset(range(32))},  # the mask allows the whole machine
    {"machine": "graviton3"},  # ARM has no AVX2
    {"instruction_sets": ()},  # unknown
    *({"instruction_sets": sets} for sets in (("avx2", "amx_tile", "amx_bf16"), ("avx2", "avx512_bf16"))),
    cgroup("cpu.max", "1600000 100000"),  # a quota of all cores
    {**file("/proc/meminfo", "damaged"), "shared": None},  # unknown memory
    environ(OMP_NUM_THREADS="1", TORCHELASTIC_RUN_ID="none"),  # torchrun's number of threads
    *(environ(OMP_NUM_THREADS=value, MKL_NUM_THREADS=value) for value in ("16", " 16 ", "16,1")),
    *(
        environ(**binding)
        for binding in ({"OMP_PROC_BIND": "False"}, {"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"})
    ),
    *(environ(**binding) for binding in ({"KMP_AFFINITY": "compact,1,0"}, {"GOMP_CPU_AFFINITY": ""})),
    environ(NANO_LOOP_PRECISION="bf16"),
    *(environ(**{name: good}) for name, (_, good) in SLOW.items()),
    *({"kernels": kernels, "cache": OPEN} for kernels in (COMPILED, PACKED)),
    {"kernels": PACKED, "cache": NOEXEC},
    {"kernels": Kernels("v4", "in the package")},
    {"kernels": Kernels(None, reason="NANO_LOOP_KERNELS=off"), **environ(NANO_LOOP_KERNELS="off")},
]
#: The name of a finding, whether it affects performance, a change after which it is the only one, and words of its
#: text, its reason and its advice.
FAULTS = [
    *(
        (
            f"{name.lower().replace('_', '-')}-{ending}",
            True,
            environ(**{name: value}),
            f"{name}={value} is set",
            why,
            "16",
        )
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        for value, ending, why in (
            ("1", "low", "15 cores stay idle"),
            ("15,2", "low", "1 core stays idle"),
            ("32", "high", "wait for each other"),
            *((text, "unreadable", "not a number") for text in ("many", "0", "")),
        )
    ),
    *(
        ("openmp-binding", True, environ(**{name: value}), name, "", "")
        for name, value in (("OMP_PROC_BIND", "CLOSE"), ("OMP_PROC_BIND", "true"), ("OMP_PLACES", "cores"))
    ),
    ("openmp-binding", True, environ(GOMP_CPU_AFFINITY="0-15"), "GOMP_CPU_AFFINITY", "", ""),
    ("openmp-binding", True, environ(KMP_AFFINITY="compact", LD_PRELOAD=INTEL), "KMP_AFFINITY", "", ""),
    *(
        ("slow-variable", True, environ(**{name: bad}), f"{name}={bad} is set", "", "")
        for name, (bad, _) in SLOW.items()
    ),
    ("slow-variable", True, environ(ONEDNN_MAX_CPU_ISA="AVX2_VNNI"), "", "avx512_bf16 and avx512f, which", ""),
    ("slow-variable", True, environ(ONEDNN_MAX_CPU_ISA="AVX512_CORE"), "", "use avx512_bf16, which", ""),
    ("refused-option", True, environ(NANO_LOOP_PRECISON="bf16"), "Write NANO_LOOP_PRECISION", "", ""),
    ("no-kernels", True, {"kernels": NO_KERNELS}, "no C compiler was found", "longer", "Install gcc"),
    ("damaged-kernels", True, {"kernels": PACKED._replace(reason=CUT_OFF)}, CUT_OFF, "longer", "--force-reinstall"),
    ("cache-folder", True, {"kernels": COMPILED, "cache": CLOSED}, "", "", ""),
    ("cache-folder", False, {"kernels": PACKED, "cache": CLOSED}, "", "", ""),
    ("cache-folder", False, {"kernels": PACKED, "cache": NO_HOME}, "no home folder", "", "Set XDG_CACHE_HOME"),
    ("cache-folder", True, {"kernels": COMPILED, "cache": MISSING}, "", "", "Set XDG_CACHE_HOME"),
    ("cache-noexec", True, {"kernels": COMPILED, "cache": NOEXEC}, "", "", ""),
    ("shared-memory", True, {"shared": 64 << 20}, "67.1 MB", "", "--shm-size"),
    ("no-bf16", False, {"instruction_sets": ("avx2", "avx512f")}, "EPYC", "", ""),
]


@pytest.mark.parametrize("change", CLEAN, ids=str)
def test_machine_without_a_fault_has_no_findings(found, change):
    assert found(**change) == []


@pytest.mark.parametrize(("name", "hurts", "change", "what", "why", "advice"), FAULTS, ids=str)
def test_fault_is_found_and_explained(only, name, hurts, change, what, why, advice):
    finding = only(**change)
    assert (finding.id, finding.hurts) == (name, hurts)
    assert (what in finding.what, why in finding.why, advice in finding.advice) == (True, True, True), finding


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            environ(MKL_VERBOSE="1") | {"instruction_sets": ("avx2",)},
            ["slow-variable", "no-bf16"],
        ),
        (environ(NANO_LOOP_PRECISION="fp8", NANO_LOOP_TIMEOUT="-1"), ["refused-option"] * 2),
        (cgroup("cpu.max", "200000 100000"), ["quota-threads"]),
        (cgroup("cpu.max", "200000 100000") | environ(OMP_NUM_THREADS="2"), []),
        ({"instruction_sets": ("sse4_2",)}, ["no-avx2", "no-bf16"]),
    ],
    ids=str,
)
def test_what_hurts_comes_first(found, change, expected):
    findings = found(**change)
    assert [finding.id for finding in findings] == expected
    assert [finding.hurts for finding in findings] == sorted((finding.hurts for finding in findings), reverse=True)


def test_findings_of_several_values_name_each(found):
    first, second = found(**environ(NANO_LOOP_PRECISION="fp8", NANO_LOOP_TIMEOUT="-1"))
    assert "NANO_LOOP_PRECISION=fp8: " in first.what
    assert "NANO_LOOP_TIMEOUT=-1: " in second.what
    assert "2 of 16 cores" in found(**cgroup("cpu.max", "200000 100000"))[0].what
    assert "EPYC" in found(instruction_sets=("sse4_2",))[0].what


# --- the documentation ---

TEXT = (Path(__file__).parents[2] / "docs/cli.md").read_text(encoding="utf-8")


def kinds_in_the_code():
    """Return for each name of a finding whether it affects performance. A name that is put together has a star."""
    kinds = {}
    for call in ast.walk(ast.parse(Path(doctor_checks.__file__).read_text())):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Finding":
            name = re.sub(r"^f'{.*}|'", "*", ast.unparse(call.args[0])).strip("*")
            flags = [ast.unparse(each.value) for each in call.keywords if each.arg == "hurts"]
            kinds[name] = {(): True, ("False",): False}.get(tuple(flags))  # None: it depends
    return kinds


def test_every_check_is_listed_and_every_finding_is_in_the_table_with_its_kind():
    own = [
        value for value in vars(doctor_checks).values() if getattr(value, "__module__", "") == doctor_checks.__name__
    ]
    assert {check for check in own if "Iterator[Finding]" in str(check.__annotations__)} == {*CHECKS}
    rows = re.findall(r"^\| (`[\w-]+`.*?) \| (hurts|note|\*) \|", TEXT, flags=re.MULTILINE)
    kinds = {name: kind for names, kind in rows for name in re.findall(r"`([\w-]+)`", names)}
    in_table = {name.removeprefix("omp-num-threads"): {"hurts": True, "note": False}.get(kinds[name]) for name in kinds}
    assert len(kinds_in_the_code()) > 13
    assert in_table == kinds_in_the_code()


def test_every_command_has_a_section():
    assert {*re.findall(r"^## (\w+)$", TEXT, flags=re.MULTILINE)} == {*app.list_commands(None)}
