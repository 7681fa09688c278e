"""Fails if a private name of torch, or of a package that it ships with, is removed or changes its behavior.

The names are derived from the modules that use them. Tests of loops, payloads and kernels cover most of the behavior;
these tests cover the rest.
"""

import ast
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nano_loop import patching
from nano_loop.patching import torch_private as private
from nano_loop.patching import torch_private_autograd as of_autograd
from nano_loop.patching import torch_private_compiler as of_compiler
from nano_loop.patching import torch_private_optimizers as of_optimizers

MODULES = [path.stem for path in Path(patching.__file__).parent.glob("torch_private*.py")]


def chains(module):
    """Yield each chain of attributes of a torch module that one of our modules uses, with its first object."""
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        names = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        start = vars(module).get(node.id) if isinstance(node, ast.Name) else None
        if names and getattr(start, "__name__", "").partition(".")[0] == "torch":
            yield start, names


@pytest.mark.parametrize("name", MODULES)
def test_each_name_is_there(name):
    module = import_module(f"{patching.__name__}.{name}")
    looked_up = 0
    for start, names in chains(module):
        for each in names:
            start = getattr(start, each)
            looked_up += 1
    assert looked_up > 3


# --- queries, before and after ---


def hook(*_):
    return None


def leaf():
    return torch.ones(1, requires_grad=True)


#: A query, its argument or what makes it, and the answer.
ANSWERS = [
    *((private.is_operator, name, True) for name in (private.FLASH_KERNEL, private.BAGS_KERNEL, "softmax.int")),
    (private.is_operator, "softmax.integer", False),
    *((private.is_loss, loss, True) for loss in (nn.CrossEntropyLoss, nn.MSELoss, nn.TripletMarginLoss)),
    (private.is_loss, nn.ReLU, False),
]


@pytest.mark.parametrize(("question", "about", "answer"), ANSWERS)
def test_question_has_its_answer(question, about, answer):
    assert question(about() if callable(about) else about) is answer


def profiling():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


#: Contexts, and the queries that are true inside them and false outside.
INSIDE = [
    (torch.overrides.BaseTorchFunctionMode, [private.in_mode], [private.in_dispatch_mode]),
    (lambda: FlopCounterMode(display=False), [private.in_mode, private.in_dispatch_mode], []),
    (profiling, [of_optimizers.is_profiling], []),
    (
        lambda: torch.autograd.graph.saved_tensors_hooks(hook, hook),
        [private.has_saved_tensor_hooks],
        [private.in_mode],
    ),
]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.12
@pytest.mark.parametrize(("context", "true", "false"), INSIDE)
def test_contexts_are_known(context, true, false):
    assert not any(each() for each in (*true, *false))
    with context():
        assert all(each() for each in true)
        assert not any(each() for each in false)
    assert not any(each() for each in true)


def test_transforms_are_told_from_plain_calls():
    seen = []
    torch.func.grad(lambda x: seen.append(private.in_functorch()) or x.sum())(torch.ones(1))
    assert (seen, private.in_functorch()) == ([True], False)


def test_hooks_and_compiled_calls_of_a_module_are_seen():
    module = nn.Linear(2, 2)
    assert private.calls_only_forward(module)
    for register in (
        *(module.register_forward_hook, module.register_forward_pre_hook),
        *(module.register_full_backward_hook, module.register_full_backward_pre_hook),
    ):
        handle = register(hook)
        assert not private.calls_only_forward(module)
        handle.remove()
    module.compile(backend="eager")
    assert not private.calls_only_forward(module)


# --- tensors ---


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_versions_bases_and_bytes_of_tensors():
    tensor = torch.arange(6.0).view(2, 3)
    before = private.version(tensor)
    tensor.add_(1)
    assert private.version(tensor) == before + 1
    with torch.inference_mode():
        assert private.version(torch.ones(1)) == 0
    whole = torch.ones(2, 3)
    assert private.base_of(whole.view(-1)[1:]) is private.base_of(whole) is whole
    assert private.bytes_of(tensor.storage()).data_ptr() == tensor.data_ptr()


def test_softmax_of_a_row_without_scores_is_zero_and_has_no_gradient():
    scores = torch.tensor([[0.5, 1.0], [-torch.inf, -torch.inf]], requires_grad=True)
    softmax = private.safe_softmax(scores)
    torch.testing.assert_close(softmax, torch.stack([scores[0].softmax(-1), torch.zeros(2)]))
    (gradient,) = torch.autograd.grad(softmax[:, 0].sum(), scores, create_graph=True)
    (second,) = torch.autograd.grad(gradient[:, 0].sum(), scores)
    assert not gradient[1].any()
    assert not second[1].any()


# --- autograd ---


def test_backwards_are_told_from_forwards_and_numbered():
    seen, x = [], leaf()
    x.register_hook(lambda gradient: seen.append((of_autograd.in_backward(), of_autograd.graph_task())))
    x.sum().backward()
    x.sum().backward()
    assert (of_autograd.in_backward(), of_autograd.graph_task()) == (False, -1)
    assert [is_inside for is_inside, _ in seen] == [True, True]
    assert len({number for _, number in seen} - {-1}) == 2


def test_hooks_of_tensors_are_called_so_and_seen_and_their_dict_goes_when_it_is_empty():
    x, tensor = leaf(), leaf()
    for each in (x, tensor):
        assert [getattr(each, name) for name in of_autograd.TENSOR_HOOKS] == [None, None]
    ours, users = (x.register_post_accumulate_grad_hook(lambda parameter: None) for _ in range(2))
    ours.remove()
    of_autograd.forget_empty_hooks(x)
    assert len(x._post_accumulate_grad_hooks) == 1
    users.remove()
    of_autograd.forget_empty_hooks(x)
    assert x._post_accumulate_grad_hooks is None
    assert not of_autograd.has_tensor_hooks(tensor)
    tensor.register_hook(print)
    assert of_autograd.has_tensor_hooks(tensor)
    tensor.register_post_accumulate_grad_hook(print)
    assert [[*getattr(tensor, name).values()] for name in of_autograd.TENSOR_HOOKS] == [[print], [print]]


class Without(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "a function"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return "an operator"


def test_tensor_without_memory_says_what_is_asked_of_it_and_gives_no_address():
    tensor = private.without_memory(Without, (2, 3), (3, 1), torch.float32)
    assert tensor + 1 == "a function"
    with private.as_plain_tensors():
        assert tensor.shape == (2, 3)
        with pytest.raises(RuntimeError):
            tensor.data_ptr()
        with pytest.raises(RuntimeError, match="cast an operator"):
            tensor + 1
    with private.as_plain_tensors(), pytest.raises(RuntimeError):
        torch.utils.dlpack.to_dlpack(tensor)


# --- torch.compile ---


def test_function_is_marked_as_the_public_decorator_marks_it():
    def ours(): ...

    def theirs(): ...

    torch.compiler.assume_constant_result(theirs)
    assert vars(of_compiler.constant_when_traced(ours)) == vars(theirs) != {}
