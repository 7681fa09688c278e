"""Every C file compiles for the processor at hand: a kernel that is compiled for any processor is slow in silence."""

import platform
from pathlib import Path

import pytest

from nano_loop.cpu import read_machine
from nano_loop.kernels import build as compiled
from nano_loop.kernels.attention import blocked_attention
from nano_loop.kernels.convolution import weight_gradient
from nano_loop.kernels.linear import product
from nano_loop.kernels.rnn import lstm_layer

SOURCES = sorted(Path(compiled.__file__).parent.glob("csrc/*.c"))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in compiled._NATIVE, reason="no flag is known for this processor")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_each_file_compiles_for_this_processor_without_an_implicit_declaration(source, tmp_path):
    command = [*compiled._compiler(), *compiled._FLAGS, *compiled._PARALLEL, "-Werror=implicit-function-declaration"]
    native = compiled._NATIVE[platform.machine()]
    assert compiled._compiles([*command, native, "-c", "-o", str(tmp_path / "native.o"), str(source)], tmp_path)
    assert compiled._compiles([*command, "-c", "-o", str(tmp_path / "generic.o"), str(source)], tmp_path)


@pytest.mark.parametrize(
    "kernel", [blocked_attention, lstm_layer, product, weight_gradient], ids=lambda kernel: kernel.__name__
)
def test_kernels_for_bf16_instructions_are_available_where_the_cpu_has_them(kernel):
    needed = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
    if not needed <= set(read_machine().instruction_sets):
        pytest.skip("the CPU has no bf16 instructions of AVX-512")
    assert kernel.KERNEL.unavailable is None


@pytest.mark.parametrize("needs", [False, True])
def test_without_a_compiler_a_kernel_says_so_and_is_no_guess(monkeypatch, needs):
    def fails(name, is_threaded):
        raise compiled.UnavailableError("no C compiler was found")

    monkeypatch.setattr(compiled, "compiled", fails)
    kernel = compiled.CompiledKernel("product", {}, needs_avx512_bf16=needs)
    assert kernel.unavailable == "no C compiler was found"
    assert not kernel.is_first_guess
