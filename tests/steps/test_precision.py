"""bf16 autocast beyond `tests/loops`: the number of casts, the skipped models, and the report."""

import argparse
import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nano_loop import NanoConfigError, NanoWarning
from nano_loop.precision.autocast.autocast import can_train_lstms
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps import precision
from nano_loop.steps.parameter_dtype import ParameterDtype
from nano_loop.steps.precision import Precision

SLOW = ("avx2",)


class Net(nn.Module):
    """Records the dtype of its inner layer's output."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 2)

    def forward(self, x):
        hidden = self.inner(x)
        self.seen = hidden.dtype
        return {"logits": self.outer(hidden), "hidden": [hidden]}


X = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))


def kept_in_a_closure(y):
    return lambda: y


@pytest.mark.parametrize(
    ("kind", "inside"),
    [
        (kept_in_a_closure, lambda out: out()),
        (lambda y: SimpleNamespace(y=[y]), lambda out: out.y[0]),
        (lambda y: argparse.Namespace(y=[y]), lambda out: out.y[0]),
    ],
    ids=["closure", "namespace", "arguments"],
)
def test_outputs_in_any_form_are_fp32(step, kind, inside):
    """`tests/patching/test_nested_tensors.py` and `tests/loops` have other forms."""
    model = Net()
    model.forward = lambda x: kind(model.inner(x))
    step(Precision, precision="bf16").apply(TrainingObjects([model]))
    out = inside(model(X))
    assert out.dtype is torch.float32
    out.sum().backward()
    assert model.inner.bias.grad.abs().eq(len(X)).all()


def test_an_output_at_two_places_is_one_tensor_through_which_gradients_pass(step):
    net = Net()
    step(Precision, precision="bf16").apply(TrainingObjects([net]))
    net.forward = lambda x: dict.fromkeys(("last", "hidden"), net.inner(x))
    out = net(X)
    out["hidden"].retain_grad()
    out["last"].sum().backward()
    assert out["hidden"].grad.eq(1).all()


def clamped(layer):
    with torch.no_grad():
        layer.weight.clamp_(-0.01, 0.01)


def clamped_by_data(layer):
    layer.weight.data.clamp_(-0.01, 0.01)


def swapped(layer):
    layer.weight.data = layer.weight.data.flip(0)


def written_by_numpy(layer):
    layer.weight.detach().numpy()[0] = 3


def renormed(layer):
    nn.functional.embedding(torch.arange(2), layer.weight, max_norm=0.1)


@pytest.mark.parametrize("change", [clamped, clamped_by_data, swapped, written_by_numpy, renormed])
@pytest.mark.parametrize("wrapped", [False, True], ids=["model", "checkpoint"])
def test_weight_that_forward_changes_is_cast_anew(step, change, wrapped):
    class Changing(Net):
        def forward(self, x):
            first = self.outer(x)
            change(self.outer)
            return first, checkpoint(self.outer, x, use_reentrant=False) if wrapped else self.outer(x)

    torch.manual_seed(0)
    model = Changing()
    plain = copy.deepcopy(model)
    step(Precision, precision="bf16").apply(TrainingObjects([model]))
    for output, expected in zip(model(X), plain(X), strict=True):
        torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)


def test_pass_without_gradients_before_one_with_them_leaves_the_weights_theirs(step):
    class Recycling(Net):
        def forward(self, x):
            with torch.no_grad():
                x = self.inner(x)
            return self.inner(x)

    model = Recycling()
    step(Precision, precision="bf16").apply(TrainingObjects([model]))
    model(X).sum().backward()
    assert model.inner.weight.grad is not None


def test_selective_checkpoints_of_a_weight_that_is_used_twice(step):
    def policy(context, operator, *args, **kwargs):
        is_product = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    class Checkpointed(Net):
        def forward(self, x):
            contexts = partial(create_selective_checkpoint_contexts, policy)
            for _ in range(2):
                x = checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)
            return x

    model = Checkpointed()
    plain = copy.deepcopy(model)
    step(Precision, precision="bf16").apply(TrainingObjects([model]))
    for one in (model, plain):
        one(X).sum().backward()
    torch.testing.assert_close(model.inner.weight.grad, plain.inner.weight.grad, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_recurrent_layers_cast_their_weights_once_a_call(step, kind):
    model = kind(64, 64)
    step(Precision, precision="bf16").apply(TrainingObjects([model]))
    with torch.profiler.profile(record_shapes=True) as profile:
        steps = torch.rand(20, 1024, 64)
        model(nn.utils.rnn.pack_padded_sequence(steps, [20] * 1024) if kind is nn.LSTM else steps)
    casts = [event.input_shapes[0] for event in profile.events() if event.name == "aten::_to_copy"]
    assert sum(shape == [*model.weight_hh_l0.shape] for shape in casts) == 2, "of the input and of the state"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # from the plain loop
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_encoder_with_a_padding_mask_is_evaluated_past_torch_s_fast_path(step, grad):
    """A separate attention layer checks the same switch."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.ModuleDict({"net": nn.TransformerEncoder(layer, 2), "attention": nn.MultiheadAttention(8, 2)}).eval()
    model.forward = lambda x, mask: (
        model.net(x, src_key_padding_mask=mask),
        model.attention(x, x, x, key_padding_mask=mask.t())[0],
    )
    x, mask = torch.randn(4, 4, 8), torch.arange(4) >= torch.tensor([4, 3, 2, 4])[:, None]
    with grad():
        expected = model(x, mask)
        step(Precision, precision="bf16").apply(TrainingObjects([model]))
        for output, exact in zip(model(x, mask), expected, strict=True):
            torch.testing.assert_close(output[~mask], exact[~mask], rtol=0.05, atol=0.05)
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # from the plain loop
@pytest.mark.parametrize("norm", [nn.LayerNorm(8), None], ids=["norm", "no norm"])
@pytest.mark.parametrize(
    "lengths", [[4, 3, 2, 4], [4, 1, 4, 3], [3, 3, 2, 1]], ids=["padding", "one position", "all padded"]
)
def test_encoder_has_zeros_at_padded_positions_as_on_torch_s_fast_path(step, lengths, norm):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm).eval()
    x, mask = torch.randn(4, 4, 8), torch.arange(4) >= torch.tensor(lengths)[:, None]
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        step(Precision, precision="bf16").apply(TrainingObjects([model]))
        for way in (mask, torch.zeros(4, 4).masked_fill(mask, -torch.inf)):
            torch.testing.assert_close(model(x, None, way), expected, rtol=0.05, atol=0.05)


def test_encoder_computes_padded_positions_where_torch_does(step):
    """In training, with gradients, and with padding in front."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
    x, mask = torch.randn(4, 4, 8), torch.arange(4) >= torch.tensor([4, 3, 2, 4])[:, None]

    def outputs():
        with torch.no_grad():
            yield model.train()(x, src_key_padding_mask=mask)
            yield model.eval()(x, src_key_padding_mask=mask.flip(1))
        yield model.eval()(x, src_key_padding_mask=mask)

    expected = [*outputs()]
    step(Precision, precision="bf16").apply(TrainingObjects([model]))
    for output, exact in zip(outputs(), expected, strict=True):
        torch.testing.assert_close(output, exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("sets", "cost"), [(SLOW, "400 times"), ((*SLOW, "avx512bw"), "slower than fp32")])
def test_cpu_without_the_instructions_is_warned_about_and_told_of_auto(step, machine, sets, cost):
    made = step(Precision, on=machine(instruction_sets=sets), precision="bf16")
    assert made.skip_reason(TrainingObjects([Net()])) is None
    with pytest.warns(NanoWarning, match=f'no bf16 instructions.*{cost}.*precision="auto"'):
        made.apply(TrainingObjects([Net()]))


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


class Listed(nn.Module):
    """Has its layer in a plain list, so torch does not see it as a submodule."""

    def __init__(self):
        super().__init__()
        self.layers = [Net()]

    def forward(self, x):
        return self.layers[0](x)["logits"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_model_that_autocast_does_not_cast_is_refused_alone_and_skipped_beside_another(step, dtype):
    model = nn.Linear(3, 2, dtype=dtype)
    made = step(Precision, precision="bf16")
    with pytest.raises(NanoConfigError, match=f"{dtype}.*model.float"):
        made.skip_reason(TrainingObjects([model]))
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


class Prediction:
    """An object of a custom class."""

    def __init__(self, hidden):
        self.hidden = hidden


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_objects_of_other_classes_are_returned_as_the_model_made_them(step, precision):
    model, made = Net(), []
    model.forward = lambda x: made.append(Prediction(model.inner(x))) or {"out": made[-1]}
    kind = ParameterDtype if precision == "bf16-true" else Precision
    step(kind, precision=precision).apply(TrainingObjects([model]))
    assert model(X)["out"] is made[0]
    assert made[0].hidden.dtype is torch.bfloat16


class Adapted(Net):
    """Has other methods than forward."""

    def merge(self, names=("a", "b"), scale=1.0):
        self.merged = (self.outer.weight @ self.inner.weight * scale).dtype

    def sample(self, count):
        return self(torch.ones(count, 3))["logits"]

    def score(self, x):
        return (x @ self.inner.weight).sum().dtype


def test_methods_that_take_no_tensors_are_fp32_and_the_modules_that_they_call_bf16(step):
    model = Adapted()
    step(Precision, precision="bf16").apply(TrainingObjects([model]))
    model.merge(names=["a"], scale=2)
    assert model.merged is torch.float32
    assert model.sample(2).dtype is torch.float32
    assert model.seen is torch.bfloat16
    assert model.score(X) is torch.bfloat16
