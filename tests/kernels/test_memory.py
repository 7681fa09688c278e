"""C functions only accept tensors as declared, and get memory that no default setting of torch affects."""

import ast
import functools
import importlib
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop import kernels, nano
from nano_loop.kernels import compiler
from nano_loop.kernels.build import CompiledKernel
from nano_loop.kernels.convolution import weight_gradient
from nano_loop.kernels.memory import CONTIGUOUS, DENSE, Pointer, UnsupportedTensorError, attempt, check
from nano_loop.optimizers import split_steps
from nano_loop.patching.operators import gives_kernels

ROOT = Path(kernels.__file__).parent
MODULES = [
    importlib.import_module(module.name) for module in pkgutil.walk_packages(kernels.__path__, "nano_loop.kernels.")
]
KERNELS = {
    kernel.name: kernel
    for module in (*MODULES, split_steps)
    for kernel in vars(module).values()
    if isinstance(kernel, CompiledKernel)
}
FUNCTIONS = [(kernel, function) for kernel in KERNELS.values() for function in kernel.functions]
#: C types of pointers to elements, by dtype; bytes, and data read in several dtypes, may have any type.
TYPES = {torch.bfloat16: "uint16_t", torch.float32: "float", torch.int64: "int64_t"}


@functools.cache
def preprocessed(name):
    source = ROOT / "csrc" / f"{name}.c"
    command = [*compiler.compiler_command(), "-fopenmp", *compiler.NATIVE.flags, "-E", "-P", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_every_source_has_a_kernel_whose_functions_are_declared():
    assert {*KERNELS, compiler.OPENMP} == {path.stem for path in (ROOT / "csrc").glob("*.c")}
    assert all(kernel.functions for kernel in KERNELS.values())


@pytest.mark.parametrize(("kernel", "function"), FUNCTIONS, ids=lambda value: getattr(value, "name", value))
def test_declaration_of_each_function_is_that_of_its_source(kernel, function):
    if kernel.unavailable is not None:
        pytest.skip(kernel.unavailable)
    (parameters,) = re.findall(rf"\b(?:void|int) {function}\(([^)]*)\)\s*\{{", preprocessed(kernel.name))
    types = re.findall(r"(?:const )?(\w+) \*", parameters)
    names = [name for name in types if name not in ("Call", "Shape", "Entry", "Activation")]  # pointers to elements
    assert len(names) == len(kernel.functions[function])
    for name, pointer in zip(names, kernel.functions[function], strict=True):
        expected = TYPES.get(pointer.dtypes[0]) if len(pointer.dtypes) == 1 else None
        assert expected in (None, name)


def test_bound_of_positions_is_that_of_the_c_file():
    source = (ROOT / "csrc/weight_gradient.c").read_text()
    assert f"#define MOST_POSITIONS {weight_gradient._MOST_POSITIONS} " in source


def others(pointer):
    """Yield tensors that a pointer rejects."""
    dtype = pointer.dtypes[0]
    tensor = torch.ones(4, 6).to(dtype)
    yield torch.ones(4, 6, dtype=torch.complex64)
    yield torch.ones(4, 6, dtype=dtype, device="meta")
    yield tensor.to_sparse()
    if dtype.is_floating_point:
        yield torch._neg_view(tensor)
    if pointer.layout in (CONTIGUOUS, DENSE):
        yield tensor[:, ::2]
    if pointer.layout == CONTIGUOUS:
        yield tensor.t()
    released = tensor.clone()
    released.untyped_storage().resize_(0)
    yield released


@pytest.mark.parametrize(
    ("kernel", "function"),
    [(kernel, function) for kernel, function in FUNCTIONS if kernel.functions[function]],
    ids=lambda value: getattr(value, "name", value),
)
def test_no_function_is_called_with_a_tensor_that_it_does_not_take(kernel, function, monkeypatch):
    monkeypatch.setattr(CompiledKernel, "_library", lambda self: pytest.fail("it was called"))
    pointers = kernel.functions[function]
    good = [torch.ones(4, 6).to(pointer.dtypes[0]) for pointer in pointers]
    for place, pointer in enumerate(pointers):
        for bad in others(pointer):
            with pytest.raises(UnsupportedTensorError):
                kernel(function, *good[:place], bad, *good[place + 1 :])
    assert attempt(kernel, function, *[torch.ones(2, dtype=torch.complex64)] * len(pointers)) is None
    with pytest.raises(ValueError, match="zip"):
        kernel(function, *good, good[-1])


def test_dense_tensors_of_a_call_lie_alike():
    pointers = (Pointer((torch.float32,), DENSE),) * 2
    images = torch.ones(2, 3, 4, 5)
    check([images.contiguous(memory_format=torch.channels_last)] * 2, pointers)
    check([torch.ones(2, 3, 1, 1), torch.ones(2, 3, 1, 1).contiguous(memory_format=torch.channels_last)], pointers)
    for other in (images.contiguous(memory_format=torch.channels_last), images[:1], images.transpose(2, 3)):
        with pytest.raises(UnsupportedTensorError):
            check([images, other], pointers)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.stem)
def test_no_memory_is_of_torchs_default_dtype_or_device(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {
            f"torch.{name}"
            for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "linspace", "rand", "eye")
        }:
            assert {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}, ast.unparse(node)


# --- visible effects in a loop ---


def test_kernels_make_their_memory_on_the_cpu_under_any_default_device(called):
    layers = [nn.Linear(32, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 512), nn.BatchNorm1d(512), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(512, 1000))
    x, labels = torch.randn(600, 32), torch.randint(0, 100, (600, 2))[:, 1]  # a column of a table
    expected = F.cross_entropy(model(x), labels).item()

    @nano(precision="bf16", verbose=False)
    def train(model):
        with torch.device("meta"):
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
        return loss.item()

    assert train(model) == pytest.approx(expected, rel=0.02)
    assert {"cross_entropy_float", *(("layer_norm", "batch_norm") if gives_kernels() else ())} <= set(called)
