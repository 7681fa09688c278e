"""Finds the operators that need a wider dtype than bf16 or fp16, and writes their table for the installed torch.

Runs every operator of torch's own database under autocast with inputs of bf16, fp16 and fp32, alone and mixed, forward
and backward. An error that fp32 does not have, or a result that is not finite or differs by more than 10% from fp32
with the same rounded inputs, is attributed to the innermost ATen operator that failed. Repeats until there are no new
ones.

Run it with each torch: ``python scripts/sweep_operators.py``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import math
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from nano_loop.patching.operators import overridden_together
from nano_loop.patching.ownership import call_state
from nano_loop.precision.autocast import widest_dtype
from nano_loop.precision.autocast.autocast import LOW_DTYPES
from nano_loop.precision.autocast.default_ops import TORCHS, as_torch_does, overload_of

# torch's tests, which include the database, derive from a class of this package, which need not be installed for it.
sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).TestCase = unittest.TestCase  # type: ignore[attr-defined]
op_db = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db

#: The number of samples to run per operator.
SAMPLES = 3
#: The rule of an operator that fails only with mixed fp32 inputs.
MIXED = "mixed"
#: Casts and factories, whose results cannot be wrong.
_NOT_RECORDED = ("to", "_to_copy", "copy_", "detach", "requires_grad_", "set_", "resize_")
#: Operators of most models, which accept bf16 with fp32 weights, and only reject fp32 with bf16 weights.
_LEFT = ("layer_norm", "native_layer_norm", "group_norm", "native_group_norm")
#: Name prefixes of operators that torch defines for its own tests.
_OF_TESTS = ("_test_", "_foobar")
#: The allowed distance from fp32's result, relative to its norm, and the smallest norm, relative to the largest one of
#: the case: gradients that cancel, as in a norm of one value, are only rounding errors.
FAR, LEAST = 0.1, 1e-3

#: Calls of which the database has no samples.
EXTRA: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "_standard_gamma": (lambda x: torch._standard_gamma(x.abs() + 1) * 0, (torch.rand(4, 4),)),
    "_sample_dirichlet": (lambda x: torch._sample_dirichlet(x.abs() + 1) * 0, (torch.rand(4, 4),)),
    "sparse.mm": (lambda x, y: torch.sparse.mm(x.to_sparse(), y), (torch.rand(4, 4), torch.rand(4, 4))),
    "sparse.addmm": (lambda x, y: torch.sparse.addmm(y, x.to_sparse(), y), (torch.rand(4, 4), torch.rand(4, 4))),
    "sparse mv": (lambda x, y: x.to_sparse().mv(y), (torch.rand(4, 4), torch.rand(4))),
    "sparse.softmax": (lambda x: torch.sparse.softmax(x.to_sparse(), 1).to_dense(), (torch.rand(4, 4),)),
    "sparse.log_softmax": (lambda x: torch.sparse.log_softmax(x.to_sparse(), 1).to_dense(), (torch.rand(4, 4),)),
    "sparse.sum": (lambda x: torch.sparse.sum(x.to_sparse(), 1).to_dense(), (torch.rand(4, 4),)),
    "multi_dot": (lambda x, y: torch.linalg.multi_dot([x, y, y]), (torch.rand(4, 4), torch.rand(4, 4))),
    "mm(out)": (lambda x, y: torch.mm(x.detach(), y.detach(), out=torch.empty(4, 4)), (torch.rand(4, 4),) * 2),
    "addmm(out)": (
        lambda x, y: torch.addmm(y.detach(), x.detach(), y.detach(), out=torch.empty(4, 4)),
        (torch.rand(4, 4),) * 2,
    ),
    "fake_quantize": (
        lambda x: torch.fused_moving_avg_obs_fake_quant(
            *(x, torch.ones(1), torch.ones(1), torch.zeros(1), torch.ones(1), torch.ones(1), torch.zeros(1).int()),
            *(0.01, 0, 255, -1),
        ),
        (torch.rand(4, 4),),
    ),
}
# In-place operators that many models call.
for name in ("relu_", "hardtanh_", "hardswish_", "gelu_"):
    EXTRA[name] = (lambda x, name=name: getattr(torch.ops.aten, name)(x), (torch.randn(4, 4),))
EXTRA["batch_norm"] = (
    lambda x: torch.nn.functional.batch_norm(x, torch.zeros(4), torch.ones(4), training=True),
    (torch.randn(8, 4, 4, 4),),
)
EXTRA["clamp_min_"] = (lambda x: x.clamp_min_(0.1), (torch.randn(4, 4),))
EXTRA["clamp_max_"] = (lambda x: x.clamp_max_(0.1), (torch.randn(4, 4),))
for name, sides in (("upsample_nearest2d", 2), ("upsample_nearest3d", 3)):
    EXTRA[name] = (lambda x: torch.nn.functional.interpolate(x, scale_factor=2), (torch.randn(1, 2, *[4] * sides),))


#: Those that write to an fp32 output.
WITH_OUT = ("mm(out)", "addmm(out)")
#: Calls whose last operator raises in the backward.
LAST = ("sparse.addmm",)


class Case(NamedTuple):
    """A call of an operator."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    differentiable: bool


def cases() -> Iterator[Case]:
    """Yield the cases to run, with fp32 inputs."""
    for info in op_db:
        functions = [info.op, info.inplace_variant]
        try:
            samples = [*itertools.islice(info.sample_inputs("cpu", torch.float32), SAMPLES)]
        except Exception:  # an operator without fp32 samples
            continue
        for function, sample in itertools.product(functions, samples):
            if function is not None:
                args, kwargs = (sample.input, *sample.args), sample.kwargs
                yield Case(info.name, function, args, kwargs, info.supports_autograd)
    for name, (function, args) in EXTRA.items():
        yield Case(name, function, args, {}, name not in WITH_OUT)


def variants(case: Case, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments of a case with all tensors in a low dtype, only the first one, and all but the first."""
    first = next((leaf for leaf in tree_leaves((case.args, case.kwargs)) if isinstance(leaf, Tensor)), None)
    for rule, is_cast in (
        (MIXED, lambda tensor: tensor is first),
        (MIXED, lambda tensor: tensor is not first),
        ("all", lambda tensor: True),
        ("float32", lambda tensor: False),
    ):

        def cast(leaf: Any, is_cast: Callable[[Any], bool] = is_cast) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            copy = leaf.detach().clone()
            if leaf.dtype is torch.float32 and is_cast(leaf):
                copy = copy.to(dtype)
            return copy

        args, kwargs = tree_map(cast, (case.args, case.kwargs))
        if rule == "float32" or any(getattr(leaf, "dtype", None) is dtype for leaf in tree_leaves((args, kwargs))):
            yield rule, args, kwargs


def computed(case: Case, args: Any, kwargs: Any, autocast: torch.dtype | None = None, seed: int = 0) -> list[Tensor]:
    """Return the outputs and the gradients of the inputs."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if case.differentiable:
        for leaf in leaves:
            leaf.requires_grad_()
    # An in-place operator must not write to a leaf.
    args, kwargs = tree_map(lambda leaf: leaf * 1 if any(leaf is one for one in leaves) else leaf, (args, kwargs))
    seeded = functools.partial(torch.manual_seed, seed)
    seeded()
    call_state.accelerated = autocast is not None
    try:
        with (
            mock.patch.object(torch, "manual_seed", side_effect=lambda _: seeded()),  # the database calls it
            torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None, cache_enabled=False),
        ):
            outputs = case.function(*args, **kwargs)
    finally:
        call_state.accelerated = False
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    if differentiable:  # with distinct weights, because the sum of a softmax has no gradient
        torch.autograd.backward([weighted(tensor) for tensor in differentiable])
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [tensor.detach() for tensor in (*tensors, *gradients)]


def weighted(tensor: Tensor) -> Tensor:
    """Return a sum of all values with distinct weights; for a sparse tensor, a sum of their absolute values."""
    if tensor.layout is not torch.strided:
        return tensor.abs().sum()
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return (parts * torch.rand(parts.shape, generator=torch.Generator().manual_seed(0))).sum()


def is_far(results: Sequence[Tensor], exact: Sequence[Tensor], far: float = FAR) -> bool:
    """Whether a result is not finite though the exact one is, or far from it relative to its norm or the largest."""
    norms = [
        float(tensor.to_dense().double().norm()) for tensor in exact if tensor.is_floating_point() and tensor.numel()
    ]
    least = LEAST * max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    for one, other in zip(results, exact, strict=False):
        if one.shape != other.shape or not (one.is_floating_point() and other.is_floating_point()) or not other.numel():
            continue
        one, other = one.to_dense().double(), other.to_dense().double()
        if bool(other.isfinite().all()) and not float((one - other).norm()) <= far * max(least, float(other.norm())):
            return True
    return False


def in_fp32(leaf: Any) -> Any:
    """Return an fp32 copy of a low-precision tensor, a copy of another tensor, or any other leaf itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().float() if leaf.dtype in LOW_DTYPES else leaf.detach().clone()


class Recorder:
    """Records the ATen operators that a case called, and the innermost one that raised."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._depth = 0
        self.clear()

    def clear(self) -> None:
        """Forget the last case."""
        self.outermost: list[str] = []
        self.raised: str | None = None

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the operators as functions that record."""
        return {name: self._recording(name) for name in self._names}

    def _recording(self, name: str) -> Callable[..., Any]:
        def record(keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            if not self._depth:
                self.outermost.append(name)
            self._depth += 1
            try:
                return as_torch_does(name, keys, *args, **kwargs)
            except Exception:
                self.raised = self.raised or name
                raise
            finally:
                self._depth -= 1

        return record


def recordable(known: Sequence[str]) -> list[str]:
    """Return the operators that can have a rule: they accept tensors."""
    names = []
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        base = name.partition(".")[0]
        if (
            name == full
            or name in known
            or "empty" in name
            or base in (*_NOT_RECORDED, *_LEFT)
            or base.endswith(("backward", "_copy"))
            or base.startswith(_OF_TESTS)
        ):
            continue
        with contextlib.suppress(Exception):
            overload = overload_of(name)
            schema = overload._schema
            views = any(argument.alias_info and not argument.alias_info.is_write for argument in schema.arguments)
            if not views and any("Tensor" in str(argument.type) for argument in schema.arguments):
                names.append(name)
    return names


def sweep(table: dict[str, set[str]], chosen: Sequence[Case]) -> tuple[dict[str, set[str]], list[str]]:
    """Return the entries missing from a table, and the failures without an operator."""
    new: dict[str, set[str]] = {}
    left: list[str] = []
    widest_dtype.TABLE.clear()
    widest_dtype.TABLE.update({name: frozenset(rules) for name, rules in table.items()})
    recorder = Recorder(recordable([*widest_dtype.functions(), *TORCHS]))
    with (
        overridden_together("sweep", recorder.functions, "AutocastCPU"),
        overridden_together("table", widest_dtype.functions, "AutocastCPU"),
    ):
        for case in chosen:
            try:
                first, second = (computed(case, *tree_map(in_fp32, (case.args, case.kwargs)), seed=i) for i in range(2))
            except Exception:  # fp32 fails as well
                continue
            draws = is_far(second, first) or "empty" in case.name
            for dtype in LOW_DTYPES:
                for rule, args, kwargs in variants(case, dtype):
                    exact = computed(case, *tree_map(in_fp32, (args, kwargs)))
                    recorder.clear()
                    try:
                        failed = is_far(computed(case, args, kwargs, dtype), exact) and not draws and "far"
                    except Exception as error:
                        failed = f"{type(error).__name__}: {str(error)[:90]}"
                    if not failed:
                        continue
                    names = [recorder.raised] if recorder.raised else [*dict.fromkeys(recorder.outermost)]
                    if case.name in LAST:
                        names = names[-1:]
                    if len(names) == 1:
                        kind = str(dtype).removeprefix("torch.") if rule == "all" else rule
                        kind = MIXED if case.name in WITH_OUT else kind
                        if kind not in table.get(names[0], ()):
                            new.setdefault(names[0], set()).add(kind)
                            continue
                    left.append(f"{case.name} {rule} {dtype}: {failed} {names}")
    return new, left


def in_few_lines(tables: dict[str, dict[str, Any]]) -> str:
    """Return JSON with a line for each operator that has rules."""
    versions = []
    for version, table in tables.items():
        widest = ",\n".join(f"   {json.dumps(name)}: {json.dumps(rules)}" for name, rules in table["widest"].items())
        versions.append(f' {json.dumps(version)}: {{\n  "widest": {{\n{widest}\n  }}\n }}')
    return "{\n" + ",\n".join(versions) + "\n}\n"


def main() -> None:
    """Write the table, and print the failures that it does not cover."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = [*cases()]
    print(len(chosen), "cases", file=sys.stderr)
    path = Path(widest_dtype.__file__).with_name("operators.json")
    tables = json.loads(path.read_text()) if path.exists() else {}
    table: dict[str, set[str]] = {}
    while True:
        new, left = sweep(table, chosen)
        print(len(new), "more", file=sys.stderr)
        if not new:
            break
        for name, rules in new.items():
            table.setdefault(name, set()).update(rules)
    version = ".".join(torch.__version__.split(".")[:2])
    widest = {name: sorted(rules) for name, rules in sorted(table.items())}
    tables[version] = {"widest": widest}
    by_version = {version: tables[version] for version in sorted(tables, key=lambda text: [*map(int, text.split("."))])}
    path.write_text(in_few_lines(by_version))
    print("\n".join(left))


if __name__ == "__main__":
    main()
