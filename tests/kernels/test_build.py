"""Libraries match the level, run on torch's threads, and are compiled only if the package does not include them."""

import functools
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.conftest import forget_libraries
from nano_loop import NanoConfigError
from nano_loop.cpu import read_machine
from nano_loop.kernels import build, compiler
from nano_loop.kernels.attention import blocked_attention
from nano_loop.kernels.build import CompiledKernel, UnavailableError
from nano_loop.kernels.compiler import LEVELS, NATIVE, library_name
from nano_loop.kernels.convolution import weight_gradient
from nano_loop.kernels.linear import product

SUPPORTED = [level for level in LEVELS if level.instruction_sets <= read_machine().instruction_sets]


@pytest.mark.parametrize("kernel", [blocked_attention, product, weight_gradient], ids=lambda kernel: kernel.__name__)
def test_kernels_for_bf16_instructions_are_available_where_the_cpu_has_them(kernel):
    if LEVELS[0] not in SUPPORTED:
        pytest.skip("the CPU has no bf16 instructions of AVX-512")
    if build.level().name not in ("bf16", "compile"):
        pytest.skip("the level has no bf16 instructions of AVX-512")
    assert kernel.KERNEL.unavailable is None


@pytest.mark.parametrize("needs", [False, True])
def test_without_a_compiler_a_kernel_says_so(monkeypatch, needs):
    def fails(name, is_threaded):
        raise UnavailableError("no C compiler was found")

    monkeypatch.setattr(build, "compiled", fails)
    kernel = CompiledKernel("product", {}, needs_avx512_bf16=needs)
    assert kernel.unavailable == "no C compiler was found"


@pytest.mark.parametrize("has_amx", [0, 1])
def test_functions_use_amx_where_they_can_and_the_system_lets_them(monkeypatch, has_amx):
    without = SimpleNamespace(is_supported=lambda: 1)
    libraries = [SimpleNamespace(is_supported=lambda: 1, has_amx=lambda: has_amx), without]
    monkeypatch.setattr(build, "compiled", lambda name, is_threaded: libraries[0])
    assert CompiledKernel("product", {}, needs_avx512_bf16=True).uses_amx == bool(has_amx)
    libraries.pop(0)
    assert not CompiledKernel("attention", {}, needs_avx512_bf16=True).uses_amx


# --- the level ---


@pytest.mark.skipif(not SUPPORTED, reason="the CPU has no AVX2")
def test_library_of_the_package_is_used_and_others_are_compiled_for_its_level(compiled_here, monkeypatch, tmp_path):
    level, package = SUPPORTED[-1], tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(compiler, "PREBUILT", package)
    monkeypatch.setenv("NANO_LOOP_KERNELS", level.name)
    forget_libraries()
    assert build.summary() == f"C kernels {level.name}"
    file = library_name("openmp", level)
    assert [path.name for path in compiled_here.iterdir()] == [file]
    (compiled_here / file).rename(package / file)
    forget_libraries()
    monkeypatch.setenv("CC", "no-such-cc -O1")
    assert build.summary() == f"C kernels {level.name}"
    assert [*compiled_here.iterdir()] == []
    assert build.for_report(CompiledKernel("norms", {}).unavailable) == "no C compiler was found (no-such-cc)"


CUT_OFF = "is truncated at byte "
DAMAGES = {
    "half of it": (lambda content: content[: len(content) // 2], CUT_OFF),
    "all but the last 4 KB": (lambda content: content[:-4096], CUT_OFF),
    "all but a byte": (lambda content: content[:-1], CUT_OFF),
    "segments alone": (
        lambda content: content[:40] + bytes(8) + content[48:60] + bytes(2) + content[62:4096],
        "is truncated",
    ),
    "its header": (lambda content: content[:64], CUT_OFF),
    "part of its header": (lambda content: content[:20], CUT_OFF),
    "nothing": (lambda content: b"", "is not a library"),
    "text": (lambda content: b"version https://git-lfs.github.com/spec/v1\n", "is not a library"),
    "that of another processor": (lambda content: content[:18] + b"\xb7\0" + content[20:], "is not a library"),
    "that of 32 bits": (lambda content: content[:4] + b"\1" + content[5:], "is not a library"),
}


@functools.cache
def content_of(name):
    with tempfile.TemporaryDirectory() as making:
        library = Path(making, "library.so")
        compiler.compile_library(name, SUPPORTED[-1], library)
        return library.read_bytes()


@pytest.fixture
def package(compiled_here, monkeypatch, tmp_path):
    """Return an empty package, into which ``package(name, change)`` puts libraries."""
    made = tmp_path / "nano_loop/kernels/prebuilt"
    made.mkdir(parents=True)
    monkeypatch.setattr(compiler, "PREBUILT", made)
    monkeypatch.setenv("NANO_LOOP_KERNELS", SUPPORTED[-1].name)
    forget_libraries()

    def put(name, change=lambda content: content):
        (made / library_name(name, SUPPORTED[-1])).write_bytes(change(content_of(name)))

    yield put
    forget_libraries()


@pytest.mark.skipif(not SUPPORTED, reason="the CPU has no AVX2")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["openmp", "cross_entropy"])
def test_damaged_library_of_the_package_is_not_loaded(package, monkeypatch, name, damage):
    """Loading a truncated library kills the process with a signal."""
    change, reason = DAMAGES[damage]
    for each in {name, "openmp"}:
        package(each, change if each == name else lambda content: content)
    monkeypatch.setenv("CC", "no-such-cc")
    found = CompiledKernel("cross_entropy", {}).unavailable
    assert found.startswith(f"{name}-{SUPPORTED[-1].name}-")
    assert reason in found
    assert found.endswith("reinstall nano_loop")
    assert build.summary() == (f"no C kernels: {found}" if name == "openmp" else f"C kernels {SUPPORTED[-1].name}")


@pytest.mark.skipif(LEVELS[0] not in SUPPORTED, reason="the CPU has no bf16 instructions of AVX-512")
def test_level_without_bf16_instructions_has_no_kernels_of_them(compiled_here, monkeypatch):
    monkeypatch.setenv("NANO_LOOP_KERNELS", "v4")
    forget_libraries()
    kernel = CompiledKernel("product", {}, needs_avx512_bf16=True)
    assert kernel.unavailable == "the C kernels here have no bf16 instructions of AVX-512"


def test_choice_that_does_not_exist_is_refused(compiled_here, monkeypatch):
    monkeypatch.setenv("NANO_LOOP_KERNELS", "avx2")
    forget_libraries()
    with pytest.raises(
        NanoConfigError, match="NANO_LOOP_KERNELS=avx2: it is one of v3, v4, bf16, neon, sve, compile, off"
    ):
        build.summary()


def test_filled_cache_folder_works_without_a_compiler(compiled_here, monkeypatch):
    lines = []
    with build.compilation_announced(lines.append):
        assert CompiledKernel("cross_entropy", {}).unavailable is None
    assert [line.partition(":")[0] for line in lines] == ["nano_loop"]  # one line for two libraries, during compilation
    assert build.level() is NATIVE
    libraries = {path.name.partition("-")[0]: path.read_bytes() for path in compiled_here.iterdir()}
    assert libraries.keys() == {"cross_entropy", "openmp"}
    assert compiled_here.stat().st_mode & 0o077 == 0
    assert not any(b"libgomp" in content for content in libraries.values())  # torch's is the only runtime
    forget_libraries()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with build.compilation_announced(lines.append):
        assert CompiledKernel("cross_entropy", {}).unavailable is None
        assert build.summary() == "C kernels compiled here"
        reason = CompiledKernel("norms", {}).unavailable
    assert len(lines) == 1  # nothing was compiled
    assert reason == build.for_report(reason) == "no C compiler was found (gcc, cc, clang)"


def test_reason_that_the_title_gives_is_not_given_again(compiled_here, monkeypatch):
    monkeypatch.setenv("CC", "no-such-cc")
    reason = CompiledKernel("norms", {}).unavailable
    assert build.summary() == f"no C kernels: {reason}"
    assert build.for_report(reason) == "there are no C kernels"


# --- OpenMP ---


def test_parallel_regions_have_torch_s_threads(threads):
    library = build.compiled("openmp", is_threaded=False)
    for number in (1, 2, 3):
        threads(number)
        assert library.max_threads() == torch.get_num_threads() == number
        assert library.threads_of_region(number) == number
    assert build.why_none() is None


@pytest.mark.parametrize("seen", [1, 5])
def test_runtime_beside_torch_s_is_not_used(compiled_here, monkeypatch, threads, seen):
    """Another runtime has its own number of threads, or the same by chance."""
    threads(5)
    monkeypatch.setattr(
        build, "compiled", lambda *_, **__: SimpleNamespace(max_threads=lambda: seen, set_threads=print)
    )
    assert build.summary() == "no C kernels: they would run on a different OpenMP runtime than torch"
    assert torch.get_num_threads() == 5


def test_objects_of_clang_are_explained(compiled_here, monkeypatch):
    def refuse(*_):
        raise OSError("openmp.so: undefined symbol: __kmpc_fork_call")

    monkeypatch.setattr(build, "_opened", refuse)
    assert build.summary() == "no C kernels: clang's OpenMP is not torch's: install gcc"


def printed(program, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout.split()


@pytest.mark.parametrize(
    ("is_shared", "beside"),
    [
        (True, "import sklearn.cluster"),
        (False, ""),
        pytest.param(False, "import sklearn.cluster", marks=pytest.mark.slow),
    ],
)
def test_kernels_run_on_torch_s_threads_whichever_runtimes_are_loaded_and_shared(is_shared, beside):
    """torch's wheels for ARM share none: their libtorch_global_deps.so only needs libc."""
    program = f"""
        import ctypes
        {beside}
        shared, ctypes.RTLD_GLOBAL = ctypes.RTLD_GLOBAL, ctypes.RTLD_GLOBAL if {is_shared} else ctypes.RTLD_LOCAL
        import torch
        ctypes.RTLD_GLOBAL = shared
        runtimes = lambda: {{line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}}
        before = hasattr(ctypes.CDLL(None), "omp_get_max_threads"), runtimes()
        from nano_loop.kernels import build
        torch.set_num_threads(2)
        reason = build.why_none()
        region = build.compiled("openmp", is_threaded=False).threads_of_region(2)
        has_another = any("scikit_learn.libs/libgomp" in runtime for runtime in before[1])
        print(has_another, before[0], before[1] == runtimes(), reason, region)
    """
    assert printed(program) == [str(bool(beside)), str(is_shared), "True", "None", "2"]


def test_runtime_is_the_one_that_the_library_calls(tmp_path):
    """Under a name with a hash, next to others, as in ``torch.libs``."""
    for folder, source, others in (
        ("other.libs/libgomp-1.so.1", "int omp_get_max_threads(void) { return 1; }", []),
        ("torch.libs/libgomp-24fd393f.so.1", "int omp_get_max_threads(void) { return 24; }", []),
        ("torch/_C.so", "int omp_get_max_threads(void); int of_torch(void) { return omp_get_max_threads(); }", [1]),
        ("kernel.so", "int omp_get_max_threads(void); int of_kernel(void) { return omp_get_max_threads(); }", []),
    ):
        library = tmp_path / folder
        library.parent.mkdir(exist_ok=True)
        needed = [str(tmp_path / "torch.libs/libgomp-24fd393f.so.1")] * len(others)
        command = [*compiler.compiler_command(), "-shared", "-fPIC", "-xc", "-", "-xnone", *needed, "-o", str(library)]
        subprocess.run(command, input=source, text=True, check=True)
    program = """
        import ctypes, runpy, sys
        compiler, *libraries = sys.argv[1:]
        other, torch = map(ctypes.CDLL, libraries[:2])
        runpy.run_path(compiler)["share_openmp"](libraries[1])
        print(torch.of_torch(), ctypes.CDLL(libraries[2]).of_kernel())
    """
    libraries = [str(tmp_path / name) for name in ("other.libs/libgomp-1.so.1", "torch/_C.so", "kernel.so")]
    assert printed(program, compiler.__file__, *libraries) == ["24", "24"]
