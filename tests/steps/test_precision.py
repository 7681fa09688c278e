"""Models run under bf16 autocast; what goes in and out stays fp32."""

import copy

import pytest
import torch
from torch import nn

from nano_loop import NanoWarning
from nano_loop.precision.policy.lstms import can_train_lstms
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps import precision
from nano_loop.steps.precision import Precision

SLOW = ("avx2",)


class Net(nn.Module):
    """Records the dtype that comes out of its inner layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 2)

    def forward(self, x):
        hidden = self.inner(x)
        self.seen = hidden.dtype
        return {"logits": self.outer(hidden), "hidden": [hidden]}

    def my_loss(self, x):
        return self(x)["logits"].square().mean()


X = torch.rand(4, 3)


@pytest.fixture
def net(step):
    model = Net()
    step(Precision, precision="bf16").apply(TrainingObjects([model]))
    return model


def test_inside_is_bf16_and_outputs_are_fp32(net):
    outputs = net(X)
    assert net.seen is torch.bfloat16
    assert outputs["logits"].dtype is outputs["hidden"][0].dtype is torch.float32


def test_methods_and_submodules_called_directly_run_in_bf16_too(net):
    assert net.my_loss(X).dtype is torch.float32
    assert net.seen is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        by_hand = net.inner(X)
    assert torch.equal(net.inner(X), by_hand.float())
    assert net.inner(X).dtype is torch.float32


def test_outputs_are_those_of_autocast_by_hand(net):
    with torch.autocast("cpu", torch.bfloat16):
        by_hand = net(X)["logits"]
    assert by_hand.dtype is torch.bfloat16, "a user's own autocast gives what it gives in the plain loop"
    assert torch.equal(net(X)["logits"], by_hand.float())


def test_undoing_gives_fp32_back(step):
    model = Net()
    made = step(Precision, precision="bf16")
    made.apply(TrainingObjects([model]))
    made.interceptors.close()
    model(X)
    assert model.seen is torch.float32


@pytest.mark.parametrize(("sets", "cost"), [(SLOW, "400 times"), ((*SLOW, "avx512bw"), "slower than fp32")])
def test_cpu_without_the_instructions_is_warned_about_and_told_of_auto(step, machine, sets, cost):
    made = step(Precision, on=machine(instruction_sets=sets), precision="bf16")
    assert made.skip_reason(TrainingObjects([Net()])) is None
    with pytest.warns(NanoWarning, match=f'no bf16 instructions.*{cost}.*precision="auto"'):
        made.apply(TrainingObjects([Net()]))


def test_auto_takes_bf16_only_where_it_is_fast(step, machine):
    slow, fast = machine(instruction_sets=SLOW), machine()
    assert step(Precision, on=fast, precision="auto").skip_reason(TrainingObjects([Net()])) is None
    assert (
        step(Precision, on=slow, precision="auto").skip_reason(TrainingObjects([Net()])).code == "no_bf16_instructions"
    )


@pytest.mark.parametrize("can", [False, can_train_lstms(torch.bfloat16)])
def test_lstms_that_torch_cannot_train_in_bf16_are_fp32(step, monkeypatch, can):
    monkeypatch.setattr(precision, "can_train_lstms", lambda dtype: can)
    torch.manual_seed(0)
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 4), "net": Net()})
    model.forward = lambda x: (*model.lstm(x), model.net(x))
    plain, x = copy.deepcopy(model.lstm), torch.rand(2, 4, 3)
    detail = step(Precision, precision="bf16").apply(TrainingObjects([model]))
    assert ("LSTMs of ModuleDict in fp32, since torch cannot train them in bfloat16 on this CPU" in detail) != can
    found, _, _ = model(x)
    assert model.net.seen is torch.bfloat16
    assert torch.equal(found, plain(x)[0]) != can
    found.sum().backward()
    plain(x)[0].sum().backward()
    assert torch.equal(model.lstm.weight_hh_l0.grad, plain.weight_hh_l0.grad) != can


def test_fp32_is_silent(step):
    assert not step(Precision).enabled


class Listed(nn.Module):
    """Its layer is in a plain list, so it is not a part of the model for torch."""

    def __init__(self):
        super().__init__()
        self.layers = [Net()]

    def forward(self, x):
        return self.layers[0](x)["logits"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_model_that_autocast_does_not_cast_is_skipped_with_the_reason(step, dtype):
    model = nn.Linear(3, 2, dtype=dtype)
    made = step(Precision, precision="bf16")
    reason = made.skip_reason(TrainingObjects([model]))
    assert reason.code == "uncast_dtype"
    assert str(dtype) in reason.detail
    assert (
        made.apply(TrainingObjects([Net(), model]))
        == f"bf16 autocast, outputs fp32; not Linear, whose parameters are {dtype}"
    )
    x = torch.rand(4, 3, dtype=dtype)
    assert model(x).dtype is dtype


def test_model_without_parameters_is_said_to_have_none(step):
    model = Listed()
    report = step(Precision, precision="bf16").apply(TrainingObjects([model]))
    assert report == (
        "bf16 autocast, outputs fp32; Listed has no parameters, so layers in a plain list belong in an nn.ModuleList"
    )
    model(X)
    assert model.layers[0].seen is torch.bfloat16, "the report is right: autocast reaches them"
