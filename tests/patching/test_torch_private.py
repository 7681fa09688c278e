"""Tells when a name that torch keeps for itself is gone."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nano_loop import disable_casts
from nano_loop.patching import torch_private as private
from nano_loop.patching.operators.operators import overridden


def test_operators_without_a_public_name_are_there():
    assert private.is_operator(private.FLASH_KERNEL)
    assert private.is_operator(private.BAGS_KERNEL)
    assert private.is_operator("softmax.int")
    assert not private.is_operator("softmax.integer")


def test_bags_are_summed_up_as_by_the_public_function():
    weight, indices, offsets = torch.rand(5, 2), torch.tensor([4, 1, 1, 0]), torch.tensor([0, 1])
    bags, *_ = private.sums_of_bags(weight, indices, offsets)
    assert torch.equal(bags, nn.functional.embedding_bag(indices, weight, offsets, mode="sum"))


def test_memory_of_another_tensor_is_known():
    tensor = torch.zeros(3)
    view = tensor[1:]
    assert not private.has_lone_storage(tensor)
    del view
    assert private.has_lone_storage(tensor)
    kept = tensor.numpy()
    assert not private.has_lone_storage(tensor)
    del kept


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


def test_trainer_puts_its_signal_handlers_back():
    trainer = Mock()
    private.put_back_signal_handlers(trainer)
    trainer._signal_connector.teardown.assert_called_once_with()


def test_transforms_are_told_from_plain_calls():
    seen = []
    torch.func.grad(lambda x: seen.append(private.in_functorch()) or x.sum())(torch.ones(1))
    assert (seen, private.in_functorch()) == ([True], False)


def test_autocast_and_modes_of_torch_functions_do_not_see_what_is_below_them():
    x, bf16 = torch.ones(2, 2), torch.ones(2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with private.below_autocast():
            assert (x @ x).dtype is torch.float32
    with disable_casts():
        with private.below_torch_functions():
            assert (bf16 + bf16).dtype is torch.bfloat16
        assert (bf16 + bf16).dtype is torch.float32


def test_changes_in_place_are_counted_outside_of_inference_mode():
    tensor = torch.ones(1)
    before = private.version(tensor)
    tensor.add_(1)
    assert private.version(tensor) == before + 1
    with torch.inference_mode():
        assert private.version(torch.ones(1)) == 0


def test_softmax_of_a_row_without_scores_is_zero_and_has_no_gradient():
    scores = torch.tensor([[0.5, 1.0], [-torch.inf, -torch.inf]], requires_grad=True)
    softmax = private.safe_softmax(scores)
    torch.testing.assert_close(softmax, torch.stack([scores[0].softmax(-1), torch.zeros(2)]))
    (gradient,) = torch.autograd.grad(softmax[:, 0].sum(), scores, create_graph=True)
    (second,) = torch.autograd.grad(gradient[:, 0].sum(), scores)
    assert not gradient[1].any()
    assert not second[1].any()


def test_operator_can_be_called_as_without_a_kernel_for_autocast():
    seen = []

    def relu(keys, x):
        seen.append(private.as_without_autocast_kernel(torch.ops.aten.relu.default, keys, x))
        return seen[-1]

    with overridden("relu", lambda _: relu, "AutocastCPU"), torch.autocast("cpu", torch.bfloat16):
        result = torch.relu(torch.tensor([-1.0, 2.0]))
    assert result.tolist() == [0.0, 2.0]
    assert len(seen) == 1


def test_losses_are_told_from_models():
    assert private.is_loss(nn.CrossEntropyLoss())
    assert private.is_loss(nn.MSELoss())
    assert private.is_loss(nn.TripletMarginLoss())
    assert not private.is_loss(nn.ReLU())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_bytes_of_a_typed_storage_are_its_memory():
    tensor = torch.arange(3.0)
    assert private.bytes_of(tensor.storage()).data_ptr() == tensor.data_ptr()


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


def test_hooks_and_compiled_calls_of_a_module_are_seen():
    def hook(*_):
        return None

    module = torch.nn.Linear(2, 2)
    assert private.calls_only_forward(module)
    for register in (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
        module.register_full_backward_pre_hook,
    ):
        handle = register(hook)
        assert not private.calls_only_forward(module)
        handle.remove()
    module.compile(backend="eager")
    assert not private.calls_only_forward(module)


def test_base_of_a_view_is_the_whole_tensor():
    tensor = torch.ones(2, 3)
    assert private.base_of(tensor.view(-1)[1:]) is tensor
    assert private.base_of(tensor) is tensor


def test_modes_are_known():
    assert not private.in_mode()
    with torch.overrides.BaseTorchFunctionMode():
        assert private.in_mode()
        assert not private.in_dispatch_mode()
    with FlopCounterMode(display=False):
        assert private.in_mode()
        assert private.in_dispatch_mode()
    assert not private.in_dispatch_mode()
