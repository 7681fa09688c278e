"""A copy of a weight is never outdated, whoever writes to the weight, and in whatever way."""

import copy
import gc
import threading
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.dlpack import from_dlpack, to_dlpack

from nano_loop.patching.torch_private import is_unwritten
from nano_loop.patching.weight_copies import WeightCopies, marked


def copies():
    return WeightCopies(lambda weight: weight.to(torch.bfloat16))


def layer():
    torch.manual_seed(0)
    return nn.Linear(8, 8, bias=False).requires_grad_(False)


def is_right(copy, weight):
    return torch.equal(copy, weight.detach().to(torch.bfloat16))


def averaged_as_stable_baselines3_does(net):
    source = torch.ones_like(net.weight)
    torch.mul(net.weight.data, 0.9, out=net.weight.data)
    torch.add(net.weight.data, source, alpha=0.1, out=net.weight.data)


def stepped(net):
    net.weight.requires_grad_(True).grad = torch.ones(8, 8)
    torch.optim.SGD(net.parameters(), lr=0.1, foreach=True).step()
    net.weight.requires_grad_(False)


def written_by_a_hook(net):
    handle = net.register_forward_pre_hook(lambda module, _: module.weight.data.mul_(2))
    net(torch.ones(1, 8))
    handle.remove()


def written_in_a_thread(net):
    thread = threading.Thread(target=lambda: net.weight.data.mul_(2))
    thread.start()
    thread.join()


def written_at_its_address(net):
    numpy.ctypeslib.as_array((numpy.ctypeslib.ctypes.c_float * 64).from_address(net.weight.data_ptr()))[...] = 1


#: Ways to write to a layer's weight.
WAYS = {
    "clamped by data, as a WGAN does": lambda net: net.weight.data.clamp_(-0.01, 0.01),
    "averaged, as Stable-Baselines3 does": averaged_as_stable_baselines3_does,
    "averaged, as MoCo does": lambda net: setattr(net.weight, "data", net.weight.data * 0.9 + 0.1),
    "from a vector": lambda net: vector_to_parameters(2 * parameters_to_vector(net.parameters()), net.parameters()),
    "loaded": lambda net: net.load_state_dict({"weight": torch.ones(8, 8)}),
    "loaded by assignment": lambda net: net.load_state_dict({"weight": torch.ones(8, 8)}, assign=True),
    "by lists": lambda net: torch._foreach_mul_([net.weight.data], 2.0),
    "stepped": stepped,
    "by a hook": written_by_a_hook,
    "in a thread": written_in_a_thread,
    "by NumPy": lambda net: numpy.multiply(array := net.weight.numpy(), 2, out=array),
    "by an array of a view": lambda net: numpy.asarray(net.weight.detach()[2:]).fill(1),
    "by DLPack": lambda net: from_dlpack(to_dlpack(net.weight.data)).mul_(2),
    "in its storage": lambda net: net.weight.untyped_storage().copy_(torch.ones(8, 8).untyped_storage()),
    "at its address": written_at_its_address,
    "past the attribute": lambda net: torch.Tensor.data.__get__(net.weight).mul_(2),
    "transposed": lambda net: setattr(net.weight, "data", net.weight.data.t()),
    "swapped": lambda net: torch.utils.swap_tensors(net.weight, nn.Parameter(torch.ones(8, 8), requires_grad=False)),
    "set to another tensor": lambda net: net.weight.set_(torch.ones(8, 8)),
    "registered anew": lambda net: setattr(net, "weight", nn.Parameter(torch.ones(8, 8), requires_grad=False)),
}


def numpys_own_memory(net):
    array = numpy.ones((8, 8), numpy.float32)
    net.weight.data = torch.from_numpy(array)
    return lambda: array.fill(2)


def memory_of_several_processes(net):
    """Through another mapping, as in another process."""
    net.share_memory()
    shared = net.weight.untyped_storage()._share_filename_cpu_()
    other = torch.UntypedStorage._new_shared_filename_cpu(*shared)
    return lambda: other.fill_(1)


#: Functions that get a weight's memory before the copy is made, and return a function that writes to it later.
BEFORE = {
    "an array": lambda net: partial(net.weight.detach().numpy().fill, 2),
    "a capsule": lambda net: partial(lambda capsule: from_dlpack(capsule).mul_(2), to_dlpack(net.weight)),
    "data": lambda net: partial(net.weight.data.mul_, 2),
    "a state": lambda net: partial(net.state_dict()["weight"].mul_, 2),
    "NumPy's own memory": numpys_own_memory,
    "memory of several processes": memory_of_several_processes,
}


@pytest.mark.parametrize("change", WAYS.values(), ids=WAYS)
def test_copy_is_outdated_once_a_weight_is_written_to(change):
    net, kept = layer(), copies()
    before = kept.make(net.weight)
    assert kept.find(net.weight) is before
    old = net.weight.detach()  # so that the copy is not just freed with its memory
    change(net)
    del old
    assert not is_right(before, net.weight)  # the write did change the weight
    found = kept.find(net.weight)
    assert found is None or is_right(found, net.weight)
    found = kept.make(net.weight)
    assert found is None or is_right(found, net.weight)


@pytest.mark.parametrize("change", BEFORE.values(), ids=BEFORE)
def test_copy_is_not_made_while_a_write_would_not_be_seen(change):
    net, kept = layer(), copies()
    write = change(net)
    before = net.weight.detach().to(torch.bfloat16)
    kept.make(net.weight)
    write()
    assert not is_right(before, net.weight)
    found = kept.find(net.weight)
    assert found is None or is_right(found, net.weight)


def test_copy_is_made_again_once_an_array_is_gone():
    net, kept = layer(), copies()
    array = net.weight.numpy()
    assert kept.make(net.weight) is None
    del array
    assert is_right(kept.make(net.weight), net.weight)


@pytest.mark.parametrize(
    "read",
    [
        lambda net: net(torch.ones(2, 8)),
        lambda net: net.weight.data.norm().item(),
        lambda net: net.state_dict()["weight"].clone(),
        lambda net: copy.deepcopy(net),
        lambda net: repr(net.weight),
        lambda net: torch.autocast("cpu", torch.bfloat16)(net)(torch.ones(2, 8)),
        lambda net: gc.collect(),
    ],
)
def test_copy_lasts_while_a_weight_is_only_read(read):
    net, kept = layer(), copies()
    made = kept.make(net.weight)
    read(net)
    assert kept.find(net.weight) is made


def test_write_copies_no_memory():
    net, kept = layer(), copies()
    address = net.weight.data_ptr()
    kept.make(net.weight)
    net.weight.data.mul_(2)
    assert net.weight.data_ptr() == address


def test_copy_is_freed_with_its_weight():
    net, kept = layer(), copies()
    kept.make(net.weight)
    del net
    assert not kept._copies


def test_no_mark_is_left():
    net = layer()
    with copies().kept() as kept:
        kept.make(net.weight)
        assert is_unwritten(net.weight)
    assert not is_unwritten(net.weight)
    assert kept.find(net.weight) is None


def test_weight_that_is_written_to_while_it_is_copied_has_no_copy():
    net = layer()

    def disturbed(weight):
        made = weight.to(torch.bfloat16)
        weight.data.mul_(2)
        return made

    kept = WeightCopies(disturbed)
    assert kept.make(net.weight) is None
    assert kept.find(net.weight) is None


def test_a_copy_for_a_caller_of_its_own_is_told_of_a_write():
    net = layer()
    mark = marked(net.weight)
    assert mark.is_still(net.weight)
    net.weight.data.mul_(2)
    assert not mark.is_still(net.weight)
