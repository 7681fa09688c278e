"""Tells when a name that torch, or what comes with it, keeps for itself is gone, or does something else.

That each is there is derived from the modules that use them. What loops, payloads and kernels do with most of them is
held by their own tests; here is what these would not see.
"""

import ast
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

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
    """Yield each chain of attributes of a module of torch's that a module of ours writes, with what it starts at."""
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


# --- what is asked, before and after ---


def hook(*_):
    return None


def leaf():
    return torch.ones(1, requires_grad=True)


class Bare(torch.optim.Optimizer):
    def __init__(self):
        pass


def compiled():
    return torch.compile(nn.Linear(2, 2), backend="eager")


#: A question, what makes that about which it is asked, and the answer.
ANSWERS = [
    *((private.is_operator, name, True) for name in (private.FLASH_KERNEL, private.BAGS_KERNEL, "softmax.int")),
    (private.is_operator, "softmax.integer", False),
    *((private.is_loss, loss, True) for loss in (nn.CrossEntropyLoss, nn.MSELoss, nn.TripletMarginLoss)),
    (private.is_loss, nn.ReLU, False),
    (of_optimizers.has_hooks, lambda: torch.optim.SGD([leaf()]), True),
    (of_optimizers.has_hooks, Bare, False),
    (of_compiler.is_compiled, lambda: nn.Linear(2, 2), False),
    (of_compiler.is_compiled, compiled, True),
    (of_compiler.compiled_call, lambda: nn.Linear(2, 2), None),
    (of_compiler.compile_context, lambda: hook, None),
]


@pytest.mark.parametrize(("question", "about", "answer"), ANSWERS)
def test_question_has_its_answer(question, about, answer):
    assert question(about() if callable(about) else about) is answer


def profiling():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


#: Contexts, and what is true in them and not outside.
INSIDE = [
    (torch.overrides.BaseTorchFunctionMode, [private.in_mode], [private.in_dispatch_mode]),
    (lambda: FlopCounterMode(display=False), [private.in_mode, private.in_dispatch_mode], []),
    (profiling, [of_optimizers.is_profiling], []),
]


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


def test_memory_of_another_tensor_is_known():
    tensor = torch.zeros(3)
    for share in (lambda: tensor[1:], tensor.numpy):
        kept = share()
        assert not private.has_lone_storage(tensor)
        del kept
        assert private.has_lone_storage(tensor)


def test_tensor_shares_memory_with_another_one_until_one_of_them_is_written():
    tensor = torch.ones(6)
    shared = private.shared_until_written(tensor)
    assert private.address_of(shared) == private.address_of(tensor)
    assert shared.sum() == 6
    assert private.is_unwritten(shared)
    shared.data[2] = 5.0
    assert not private.is_unwritten(shared)
    assert private.address_of(shared) != private.address_of(tensor)
    assert (shared.sum().item(), tensor.sum().item()) == (10, 6)
    last = private.address_of(tensor)
    tensor.add_(1)  # nobody else has the memory any more, so it is not copied
    assert private.address_of(tensor) == tensor.data_ptr() == last
    with pytest.raises(RuntimeError, match="storage"):
        private.shared_until_written(torch.ones(1).share_memory_())


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


def test_tensors_are_copied_in_groups_of_any_layouts_and_dtypes():
    targets = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(3, 2).t()]
    targets += [torch.zeros(2, dtype=torch.complex64).conj(), torch.zeros(2, dtype=torch.complex64).conj().imag]
    sources = [torch.rand(3, 2).t(), torch.rand(4), torch.rand(2, 3), torch.rand(2) * 1j, torch.rand(2)]
    private.foreach_copy(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))


@pytest.mark.parametrize("lazy", [False, True], ids=["plain", "with lazy signs"])
def test_tensors_are_added_and_scaled_in_groups(lazy):
    def tensors():
        both = [torch.ones(2, 3), torch.full((3, 2), 2.0).t()]
        return [*both, torch.full((2,), -3j).conj().imag] if lazy else both

    for change, expected in (
        (lambda each: private.foreach_add(each, [torch.ones_like(one) for one in each]), (2, 3, 4)),
        (lambda each: private.foreach_multiply(each, 3), (3, 6, 9)),
        (lambda each: private.foreach_divide(each, 2), (0.5, 1, 1.5)),
    ):
        targets = tensors()
        change(targets)
        change([])
        for target, value in zip(targets, expected, strict=False):
            assert target.eq(value).all()


def test_groups_are_numbered_from_0_again(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    with pytest.raises(RuntimeError):  # there is no such rank
        torch.distributed.init_process_group("gloo", store=store, rank=1, world_size=1)
    private.forget_group_count()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert torch.distributed.group.WORLD.group_name == "0"
    finally:
        torch.distributed.destroy_process_group()


def test_trainer_puts_its_signal_handlers_back():
    trainer = Mock()
    private.put_back_signal_handlers(trainer)
    trainer._signal_connector.teardown.assert_called_once_with()


# --- autograd ---


def test_backwards_are_told_from_forwards_and_numbered():
    seen, x = [], leaf()
    x.register_hook(lambda gradient: seen.append((of_autograd.in_backward(), of_autograd.graph_task())))
    x.sum().backward()
    x.sum().backward()
    assert (of_autograd.in_backward(), of_autograd.graph_task()) == (False, -1)
    assert [is_inside for is_inside, _ in seen] == [True, True]
    assert len({number for _, number in seen} - {-1}) == 2


def test_callback_runs_before_backward_returns_and_may_raise():
    seen, x = [], leaf()

    def callback():
        seen.append(x.grad.clone())
        raise ValueError("from the callback")

    x.register_hook(lambda gradient: of_autograd.queue_callback(callback))
    with pytest.raises(ValueError, match="from the callback"):
        x.sum().backward()
    assert seen == [torch.ones(1)]


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


def test_leaf_is_reached_by_the_backward_that_does_not_say_what_to_reach():
    seen, weight, other = [], leaf(), leaf()
    middle = weight * other
    middle.register_hook(lambda gradient: seen.append(of_autograd.reaches(middle.grad_fn.next_functions[1][0])))
    out = middle.sum()
    out.backward(retain_graph=True)
    assert seen == [True]
    for inputs in ([middle], [weight], [middle, weight]):
        torch.autograd.grad(out, inputs, retain_graph=True)
        out.backward(inputs=inputs, retain_graph=True)
    assert seen == [True, *[False] * 6]


# --- torch.compile ---


def test_function_is_marked_as_the_public_decorator_marks_it():
    def ours(): ...

    def theirs(): ...

    torch.compiler.assume_constant_result(theirs)
    assert vars(of_compiler.constant_when_traced(ours)) == vars(theirs) != {}
