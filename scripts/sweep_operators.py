"""Finds the operators that need a wider dtype than bf16 or fp16, and writes their table for the installed torch.

Runs every operator of torch's own database under autocast with inputs of bf16, fp16 and fp32, alone and beside others,
forward and backward. An error that fp32 does not have, or a result that is not finite where that of fp32 is, is
attributed to the innermost ATen operator that failed. Repeats until there is no new one.

Run it with each torch: ``python scripts/sweep_operators.py``. It needs ``expecttest``, as the database does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from nano_loop.patching.operators.operators import overridden_together
from nano_loop.patching.ownership import call_state
from nano_loop.precision.autocast import widest_dtype
from nano_loop.precision.autocast.autocast import LOW_DTYPES
from nano_loop.precision.autocast.default_ops import TORCHS, as_torch_does, overload_of

#: How many samples of an operator are run.
SAMPLES = 3
#: The rule of an operator that fails beside fp32 alone.
MIXED = "mixed"
#: Casts and factories, which have no result to be wrong.
_NOT_RECORDED = ("to", "_to_copy", "copy_", "detach", "requires_grad_", "set_", "resize_")
#: Operators of most models, which take bf16 beside fp32 weights, and refuse fp32 beside bf16 weights alone.
_LEFT = ("layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "_softmax_backward_data")

#: What the database has no samples of.
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
    "fake_quantize": (
        lambda x: torch.fused_moving_avg_obs_fake_quant(
            *(x, torch.ones(1), torch.ones(1), torch.zeros(1), torch.ones(1), torch.ones(1), torch.zeros(1).int()),
            *(0.01, 0, 255, -1),
        ),
        (torch.rand(4, 4),),
    ),
}


#: Those that write to an fp32 output.
WITH_OUT = ("mm(out)",)
#: Those whose last operator is the one that raises in the backward.
LAST = ("sparse.addmm",)


class Case(NamedTuple):
    """A call of an operator."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    differentiable: bool


def cases() -> Iterator[Case]:
    """Yield what is run, with fp32 inputs."""
    for info in op_db:
        functions = [info.op, info.inplace_variant]
        try:
            samples = [*itertools.islice(info.sample_inputs("cpu", torch.float32), SAMPLES)]
        except Exception:  # of an operator without fp32 samples
            continue
        for function, sample in itertools.product(functions, samples):
            if function is not None:
                args, kwargs = (sample.input, *sample.args), sample.kwargs
                yield Case(info.name, function, args, kwargs, info.supports_autograd)
    for name, (function, args) in EXTRA.items():
        yield Case(name, function, args, {}, name not in WITH_OUT)


def variants(case: Case, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments of a case with all tensors in a low dtype, the first one alone, and all but the first."""
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


def computed(case: Case, args: Any, kwargs: Any, autocast: torch.dtype | None) -> list[Tensor]:
    """Return the outputs and the gradients of the inputs."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if case.differentiable:
        for leaf in leaves:
            leaf.requires_grad_()
    # An operator in place writes to no leaf.
    args, kwargs = tree_map(lambda leaf: leaf * 1 if any(leaf is one for one in leaves) else leaf, (args, kwargs))
    torch.manual_seed(0)
    call_state.accelerated = autocast is not None
    try:
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None, cache_enabled=False):
            outputs = case.function(*args, **kwargs)
    finally:
        call_state.accelerated = False
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    if differentiable:
        torch.autograd.backward([tensor.abs().sum() for tensor in differentiable])
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [tensor.detach() for tensor in (*tensors, *gradients)]


def is_far(found: Sequence[Tensor], exact: Sequence[Tensor]) -> bool:
    """Whether a result is not finite where the exact one is."""
    for one, other in zip(found, exact, strict=False):
        if one.shape != other.shape or not (one.is_floating_point() and other.is_floating_point()) or not other.numel():
            continue
        one, other = one.to_dense().double(), other.to_dense().double()
        if bool(other.isfinite().all()) and not bool(one.isfinite().all()):
            return True
    return False


def copied(leaf: Any) -> Any:
    """Return a tensor's copy, or another leaf itself."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


class Recorder:
    """The ATen operators that a case has called, and the innermost one that raised."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._depth = 0
        self.clear()

    def clear(self) -> None:
        """Forget the last case."""
        self.outermost: list[str] = []
        self.raised: str | None = None

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the operators that record."""
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
    """Return the operators that can have a rule: they take tensors."""
    names = []
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        if (
            name == full
            or name in known
            or "empty" in name
            or name.partition(".")[0] in (*_NOT_RECORDED, *_LEFT)
            or name.endswith(("backward", "_copy"))
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
    """Return what is not yet in a table, and the failures that no operator was found for."""
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
                exact = computed(case, *tree_map(copied, (case.args, case.kwargs)), None)
            except Exception:  # fp32 does not have it either
                continue
            for dtype in LOW_DTYPES:
                for rule, args, kwargs in variants(case, dtype):
                    recorder.clear()
                    try:
                        failed = is_far(computed(case, args, kwargs, dtype), exact) and "far"
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
    tables[version] = {name: sorted(rules) for name, rules in sorted(table.items())}
    rows = (
        f'  "{version}": {{\n'
        + ",\n".join(f'    "{name}": {json.dumps(rules)}' for name, rules in rows.items())
        + "\n  }"
        for version, rows in tables.items()
    )
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print("\n".join(left))


if __name__ == "__main__":
    main()
