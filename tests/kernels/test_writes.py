"""A program may write to inputs and outputs of functions, and cut gradients, as with torch's own functions."""

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kernels.differentiated import ROWS
from nano_loop import accelerated
from nano_loop.patching.operators import gives_kernels

pytestmark = pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")
#: Rows in fp32. The first one of each autograd function is fast, the others are slow.
IN_FP32 = [name for name, row in ROWS.items() if "precision" not in row.options]
FIRST = {function: name for name in reversed(IN_FP32) for function in ROWS[name].functions}.values()
EACH_ROW = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FIRST)) for name in IN_FP32]
)


class Cut(torch.autograd.Function):
    """Returns no gradient, like `torch.sign` or a cut straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return None


def written(tensor):
    return tensor.mul_(1.5) if tensor.is_floating_point() and tensor.requires_grad else tensor


def multiplied(tensor):
    return tensor * 1.5 if tensor.is_floating_point() and tensor.requires_grad else tensor


def cut(tensor):
    return Cut.apply(tensor) if tensor.requires_grad else tensor


class Calls(TorchFunctionMode):
    """Records the inputs and outputs of torch functions, and changes the results of one of them."""

    def __init__(self, place=None, change=None):
        super().__init__()
        self.place, self.change = place, change
        self.names, self.tensors, self.results = [], {}, []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        if tensors and not any(tensor is leaf for tensor in tensors for leaf in tree_leaves((args, kwargs))):
            for leaf in tree_leaves((args, kwargs, results)):
                if isinstance(leaf, Tensor):
                    self.tensors.setdefault(id(leaf), leaf)
            self.names.append(function.__name__)
            self.results.append([(each.dtype, each.shape, each.stride(), each._is_view()) for each in tensors])
            if len(self.results) - 1 == self.place:
                results = tree_map_only(Tensor, self.change, results)
        return results


class Recorded(nn.Module):
    """Calls a module inside a mode, which does not see the run's work around the call."""

    def __init__(self, module):
        super().__init__()
        self.module, self.calls = module, None

    def forward(self, x):
        with self.calls:
            return self.module(x)


class Model:
    """The model of a row, with the leaves of its graph, which are restored after each call."""

    def __init__(self, row, has_gradient):
        torch.manual_seed(0)
        self.module, self.x = Recorded(row.build()), torch.randn(row.shape)
        if "channels_last" in row.options:
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        weights = [*self.module.parameters()]
        self.leaves = [self.x.requires_grad_(has_gradient or not weights), *weights]
        self.wanted = [leaf for leaf in self.leaves if leaf.requires_grad]

    def gradients(self, calls, write=None):
        """Return the gradients, or the error raised. `write` is the index of a tensor in `calls.tensors`."""
        before = [leaf.detach().clone() for leaf in self.leaves]
        torch.manual_seed(1)
        try:
            self.module.calls = calls
            loss = (self.module(self.x) * 1.3).sin().sum()
            if write is not None:
                tensor = [*calls.tensors.values()][write]
                with torch.no_grad():
                    tensor.mul_(0.5) if tensor.is_floating_point() else tensor.zero_()
            return torch.autograd.grad(loss, self.wanted, allow_unused=True)
        except RuntimeError as error:
            return error
        finally:
            with torch.no_grad():
                for leaf, value in zip(self.leaves, before, strict=True):
                    leaf.copy_(value)


def is_near(found, expected):
    if isinstance(found, RuntimeError) or isinstance(expected, RuntimeError):
        return False
    for one, other in zip(found, expected, strict=True):
        if (one is None) != (other is None):
            return False
        if one is not None and not torch.allclose(one, other, rtol=1e-4, atol=1e-5 * other.abs().max().item()):
            return False
    return True


@pytest.fixture(params=[pytest.param(True, id="of all"), pytest.param(False, id="of weights")])
def compared(request, name, everything_in_c):
    """Two models of a row, plain and in a run, and the results of a function for both."""
    row = ROWS[name]
    plain, ours = (Model(row, request.param) for _ in range(2))

    def compute(function):
        with row.around():
            theirs = function(plain)
        with row.around(), run:
            return theirs, function(ours)

    run = accelerated(ours.module, verbose=False, tune_operators=False, **row.options)
    with contextlib.ExitStack() as stack:
        if row.around is contextlib.nullcontext:  # one run for all calls
            stack.enter_context(run)
            run = contextlib.nullcontext()
        yield compute


@EACH_ROW
def test_results_have_torchs_strides_and_are_views_where_torchs_are(compared):
    def results(model):
        calls = Calls()
        model.gradients(calls)
        return [*zip(calls.names, calls.results, strict=True)]

    theirs, ours = compared(results)
    assert ours == theirs


@EACH_ROW
def test_what_is_written_to_between_forward_and_backward_is_not_read_or_is_an_error(compared):
    """If torch computes, so does nano_loop; if torch raises, nano_loop raises or is right."""

    def outcomes(model):
        calls = Calls()
        untouched = model.gradients(calls)
        return untouched, [model.gradients(Calls(), place) for place in range(len(calls.tensors))]

    (untouched, theirs), (_, ours) = compared(outcomes)
    assert len(theirs) == len(ours) > 0
    for place, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if isinstance(their, RuntimeError):
            assert isinstance(our, RuntimeError) or is_near(our, untouched), f"tensor {place}: {their}"
        else:
            assert is_near(our, their), f"tensor {place}: {our!r:.300}"


@EACH_ROW
def test_results_can_be_written_to_in_place(compared):
    def outcomes(model, change):
        calls = Calls()
        model.gradients(calls)
        return [model.gradients(Calls(place, change)) for place in range(len(calls.results))]

    theirs, ours = compared(lambda model: (outcomes(model, written), outcomes(model, multiplied)))
    for place, (their, right, our) in enumerate(zip(*theirs, ours[0], strict=True)):
        if not isinstance(our, RuntimeError) or not isinstance(their, RuntimeError):
            assert is_near(our, right), f"call {place}: {our!r:.300}"


@EACH_ROW
def test_undefined_gradients_of_results_stay_undefined(compared):
    def outcomes(model):
        calls = Calls()
        model.gradients(calls)
        return [model.gradients(Calls(place, cut)) for place in range(len(calls.results))]

    for place, (their, our) in enumerate(zip(*compared(outcomes), strict=True)):
        are_errors = isinstance(our, RuntimeError) and isinstance(their, RuntimeError)
        assert are_errors or is_near(our, their), f"call {place}: {our!r:.300}, {their!r:.300}"
