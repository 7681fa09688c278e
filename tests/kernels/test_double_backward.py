"""Autograd functions and replaced operators have torch's derivatives, whichever way they are computed."""

import contextlib
import functools
import re
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from kernels.differentiated import ROWS, modules
from nano_loop import accelerated
from nano_loop.patching.operators import gives_kernels

pytestmark = [
    pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9"),
    # torch's own warning about operators without a batching rule
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # in forward mode, in 2.15 too
]


def subclasses(kind):
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def name_of(function):
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def test_every_function_and_every_replaced_operator_has_a_row():
    found = [*modules()]
    names = {each.__name__ for each in found}
    functions = {name_of(each) for each in subclasses(torch.autograd.Function) if each.__module__ in names}
    assert functions == {name for row in ROWS.values() for name in row.functions}
    operators = set()
    for module in (each for each in found if each.__name__.startswith("nano_loop.kernels.")):
        operators |= {each.operator for each in getattr(module, "OVERRIDES", ())}
        operators |= {*re.findall(r'overridden\(\s*"([\w.]+)"', Path(module.__file__).read_text())}
    with_gradient = {name for name in operators if not name.endswith(".out")} - {"empty_like"}
    assert with_gradient == {name for row in ROWS.values() for name in row.operators}


def loss_of_output(y):
    return (y * 1.3).sin().sum()


def first(call, leaves, **options):
    return torch.autograd.grad(loss_of_output(call(leaves[0])), leaves, **options)


def second(call, leaves):
    firsts = first(call, leaves, create_graph=True)
    return [*firsts, *torch.autograd.grad(sum(each.square().sum() for each in firsts), leaves, materialize_grads=True)]


def vectors(y):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, *y.shape, generator=generator, dtype=torch.double).to(y.dtype)


def batched_twice(call, leaves):
    y = call(leaves[0])
    firsts = torch.autograd.grad(y, leaves, vectors(y), is_grads_batched=True, create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in firsts), leaves, materialize_grads=True)


def hessian_products(call, leaves):
    (slope,) = torch.autograd.grad(loss_of_output(call(leaves[0])), leaves[:1], create_graph=True)
    return torch.autograd.grad(slope, leaves[:1], vectors(slope), is_grads_batched=True)


def negative(call, leaves):
    y = call(leaves[0])
    vector = vectors(y)[0]
    return torch.autograd.grad(y, leaves, torch.complex(vector, vector).conj().imag)


def mapped(call, leaves):
    y = call(leaves[0])
    return torch.func.vmap(functools.partial(torch.autograd.grad, y, leaves, retain_graph=True))(vectors(y))


def functional(call, leaves):
    slope = torch.func.grad(lambda x: loss_of_output(call(x)))
    return [torch.func.grad(lambda x: slope(x).square().sum())(leaves[0].detach())]


def of_each_batch(call, leaves):
    of_batch = torch.func.grad(lambda x: loss_of_output(call(x)))
    return [torch.func.vmap(of_batch)(torch.stack([leaves[0].detach(), leaves[0].detach().cos()]))]


def tangent(call, leaves):
    x = leaves[0].detach()
    with forward_ad.dual_level():
        return [forward_ad.unpack_dual(call(forward_ad.make_dual(x, x.cos()))).tangent]


def checkpointed(way, use_reentrant):
    def checkpointed_way(call, leaves):
        return way(lambda x: checkpoint(call, x, use_reentrant=use_reentrant), leaves)

    return checkpointed_way


def by_backward(call, leaves):
    loss_of_output(call(leaves[0])).backward()
    found = [each.grad.clone() for each in leaves]
    for each in leaves:
        each.grad = None
    return found


WAYS = {
    "first": first,
    "create_graph": second,
    "is_grads_batched, create_graph": batched_twice,
    "is_grads_batched, of a gradient": hessian_products,
    "negative bit": negative,
    "vmap": mapped,
    "func.grad of func.grad": functional,
    "vmap of func.grad": of_each_batch,
    "forward mode": tangent,
    "checkpoint, create_graph": checkpointed(second, False),
    "reentrant checkpoint": checkpointed(by_backward, True),
}


#: In bf16, these results are only noise.
IN_FP32 = {"is_grads_batched, of a gradient"}


#: Functions that only a second derivative calls.
ONLY_BEHIND = {"cross_entropy._Place", "sync_batch_norm._RankSum"}
UNIMPLEMENTED = "is not implemented"


#: The number of models, and how they are composed.
CALLS = {
    "twice": (1, lambda model: lambda x: model(model(x))),
    "in two models": (2, lambda one, other: lambda x: other(one(x)) + one(x)),
}


def functions_in(graph):
    nodes, names = {graph}, set()
    while nodes:
        node = nodes.pop()
        nodes |= {following for following, _ in node.next_functions if following is not None}
        if hasattr(node, "_forward_cls"):
            names.add(name_of(node._forward_cls))
    return names


def computed(row, way, calls, dtype=torch.float32, autocast=False, options=None):
    """Return the result of a way, plain or in a run, or the error that it raises; and the functions in the graph."""
    count, make = CALLS[calls]
    torch.manual_seed(0)
    models, x, functions = [row.build().to(dtype) for _ in range(count)], torch.randn(row.shape).to(dtype), set()
    if "channels_last" in row.options:
        x = x.contiguous(memory_format=torch.channels_last)
    leaves = [x.requires_grad_(), *(weight for model in models for weight in model.parameters())]

    def call(x):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = make(*models)(x).to(dtype)
        if way == "first":
            functions.update(functions_in(y.grad_fn))
        return y

    run = contextlib.nullcontext()
    if options is not None:
        run = accelerated(models, verbose=False, tune_operators=False, **options)
    try:
        with row.around(), run:
            return [each.detach().double() for each in WAYS[way](call, leaves)], functions
    except RuntimeError as error:
        return error, functions


def error_of(found, exact):
    return ((found - exact).norm() / (exact.norm() + 1e-3)).item()


def differences(row, way, calls):
    """Yield results whose error exceeds torch's, relative to torch in fp64, and errors that differ from torch's."""
    precision, where = row.options.get("precision"), f"{way}, called {calls}"
    exact, _ = computed(row, way, calls, torch.float64)
    torchs, _ = computed(row, way, calls, autocast=precision is not None)
    ours, functions = computed(row, way, calls, options=row.options)
    if isinstance(exact, RuntimeError) and not isinstance(torchs, RuntimeError):
        exact = torchs  # as for LSTMs, which torch maps only in fp32
    if "view size is not compatible" in str(torchs) and not isinstance(ours, RuntimeError):
        return  # a bug of torch, in the forward mode of group norms of NHWC images
    missing = {*row.functions} - functions - ONLY_BEHIND
    if way == "first" and missing:
        yield f"{where}: {missing} are not in the graph"
    if row.has_torchs_errors and isinstance(torchs, RuntimeError) and str(ours) != str(torchs):
        yield f"{where}: {ours!r:.200} instead of torch's own error, {torchs!r:.200}"
    if isinstance(ours, RuntimeError) or isinstance(exact, RuntimeError):
        kinds = [isinstance(each, RuntimeError) and UNIMPLEMENTED in str(each) for each in (ours, torchs)]
        if not (isinstance(ours, RuntimeError) and isinstance(torchs, RuntimeError) and kinds[0] == kinds[1]):
            yield f"{where}: {ours!r:.200} instead of {torchs!r:.200}"
        return
    for place, right in enumerate(exact):
        error = error_of(ours[place], right)
        bound = 1e-5 if isinstance(torchs, RuntimeError) else error_of(torchs[place], right)
        if not error <= 3 * bound + (2e-6 if precision is None else 2e-2):
            yield f"{where}: result {place} has an error of {error:.2g}, torch's {bound:.2g}"


#: How models are called, and the ways to differentiate them.
CALLED = {"twice": WAYS.keys(), "in two models": {"create_graph"}}


@pytest.mark.parametrize(("calls", "ways"), CALLED.items(), ids=CALLED)
@pytest.mark.parametrize("name", ROWS)
def test_derivatives_are_torchs(everything_in_c, called, name, calls, ways):
    row, found = ROWS[name], []
    if row.kernel is not None and row.kernel.unavailable is not None:
        pytest.skip(row.kernel.unavailable)
    for way in ways:
        if way not in IN_FP32 or "precision" not in row.options:
            found += differences(row, way, calls)
            assert way != "first" or row.calls is None or row.calls in called
    assert not found
