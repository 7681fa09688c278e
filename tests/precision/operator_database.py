"""Run every operator of torch's database in a run, forward and backward, and print differences from fp32 as JSON.

``python operator_database.py bf16``: the first input is bf16, as after an earlier layer, with fp32 parameters. This is
a program, because importing the database prevents its process from setting flags of `torch.backends`.
"""

import json
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
from sweep_operators import cases, computed, in_fp32, is_far  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

import nano_loop  # noqa: E402
from benchmarks.gradient_errors import every_product_rounded  # noqa: E402

#: Relative to the norm; for rounded products, four units in the last place.
FAR = {"bf16": 0.1, "bf16-products": 2**-6}


class Operator(nn.Module):
    """Calls a function; a given dtype is applied to its first tensor."""

    def __init__(self, dtype=None):
        super().__init__()
        self.large = nn.Parameter(torch.ones(256, 256))
        self.dtype = dtype

    def forward(self, function, args, kwargs):
        if self.dtype is not None:
            first = first_of(args, kwargs)
            args, kwargs = tree_map(lambda leaf: leaf.to(self.dtype) if leaf is first else leaf, (args, kwargs))
        return function(*args, **kwargs)


def first_of(args, kwargs):
    leaves = tree_leaves((args, kwargs))
    return next((leaf for leaf in leaves if getattr(leaf, "dtype", None) is torch.float32), None)


def results(model, case, seed=0, rounded=False):
    """Return the outputs and gradients of a case, or the error."""
    args, kwargs = tree_map(in_fp32, (case.args, case.kwargs))
    first = first_of(args, kwargs)
    if rounded and first is not None:
        first.copy_(first.bfloat16())
    called = case._replace(function=lambda *args, **kwargs: model(case.function, args, kwargs))
    try:
        return computed(called, args, kwargs, seed=seed)
    except Exception as error:
        return error


def swept(precision):
    """Return the operators that raise, change a dtype, or are far off, separating those that fp32 gets wrong, too."""
    plain, model = Operator(), Operator(torch.bfloat16 if precision == "bf16" else None)
    chosen = [(case, exact) for case in cases() if isinstance(exact := results(plain, case), list)]
    run = nano_loop.nano(precision=precision, verbose=False, tune_operators=False, num_threads=1)
    with every_product_rounded() if precision == "bf16-products" else nullcontext():
        ours = run(lambda model: [results(model, case) for case, _ in chosen])(model)
    found = {"raised": {}, "dtype": set(), "far": set(), "ill-conditioned": set(), "cases": len(chosen)}
    for (case, exact), values in zip(chosen, ours, strict=True):
        if isinstance(values, Exception):
            found["raised"][case.name] = str(values)
            continue
        if [value.dtype for value in values] != [value.dtype for value in exact]:
            found["dtype"].add(case.name)
        draws = "empty" in case.name or is_far(results(plain, case, seed=1), exact)
        if not draws and is_far(values, exact, FAR[precision]):
            ill_conditioned = precision == "bf16" and is_far(results(plain, case, rounded=True), exact)
            found["ill-conditioned" if ill_conditioned else "far"].add(case.name)
    return {name: sorted(value) if isinstance(value, set) else value for name, value in found.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(json.dumps(swept(sys.argv[1])))
