"""Calls whose products are too small for bf16 run in fp32 under "auto", and the report says so."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop.precision.policy import bf16_policy
from nano_loop.precision.policy.bf16_policy import Bf16Policy, kind_of
from nano_loop.precision.policy.lstms import can_train_lstms
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.precision import Precision


class Net(nn.Module):
    """Records the dtype that comes out of its layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out = self.layer(x)
        self.seen = (out[0] if isinstance(out, tuple) else out).dtype
        return out

    def act(self, x):
        return self(x)

    def fit(self, x):
        for _ in range(bf16_policy.MOST_NODES):
            self(x)


SMALL, LARGE = (torch.zeros(64, 64), nn.Linear(64, 64)), (torch.zeros(512, 256), nn.Linear(256, 512))
LARGE_ONES = {
    "linear": LARGE,
    "linear without bias": (torch.zeros(512, 256), nn.Linear(256, 512, bias=False)),
    "convolution": (torch.zeros(4, 64, 32, 32), nn.Conv2d(64, 64, 3)),
    "transposed convolution": (torch.zeros(4, 64, 32, 32), nn.ConvTranspose2d(64, 64, 2, 2)),
    "LSTM": (torch.zeros(16, 32, 128), nn.LSTM(128, 128)),
    "attention": (torch.zeros(8, 128, 128), nn.TransformerEncoderLayer(128, 4, batch_first=True)),
}
WITHOUT_PRODUCTS = (torch.zeros(8, 4), nn.PReLU())


@pytest.fixture
def run(step):
    """Set a model up."""

    def make(layer, precision="auto", **options):
        model, made = Net(layer), step(Precision, precision=precision, **options)
        made.apply(TrainingObjects([model]))
        return model, made

    return make


def test_auto_runs_small_calls_in_fp32_after_the_first_of_a_size(run):
    x, layer = SMALL
    model, made = run(layer)
    model(x)
    assert model.seen is torch.bfloat16
    assert torch.equal(model(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert model.seen is torch.float32
    assert made.final_result().status == "skipped"
    assert "too small" in made.final_result().detail
    assert "Net" in made.final_result().detail


@pytest.mark.parametrize("case", LARGE_ONES)
def test_auto_runs_large_calls_in_bf16(run, case):
    x, layer = LARGE_ONES[case]
    if isinstance(layer, nn.LSTM) and not can_train_lstms(torch.bfloat16):
        pytest.skip("torch cannot train LSTMs in bf16 on this CPU")
    model, made = run(layer)
    model(x)
    first = model.seen
    model(x)
    assert model.seen is first
    # The last layer of the encoder is the norm of a sum in fp32.
    assert first is (torch.float32 if case == "attention" else torch.bfloat16)
    assert made.final_result() is None


def test_each_size_of_inputs_is_judged_alone(run):
    model, made = run(nn.Linear(256, 512))
    seen = []
    for rows in (512, 8, 512, 8, 512):
        model(torch.zeros(rows, 256))
        seen.append(model.seen)
    assert seen[2:] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert made.final_result().status == "applied"


def test_methods_are_judged_at_their_second_call_and_inner_modules_at_their_first(run):
    x, layer = SMALL
    model, _ = run(layer)
    exact = nn.functional.linear(x, layer.weight, layer.bias)
    model.act(x)
    for call in (model.act, model.layer):
        assert not torch.equal(call(x), exact), "the call that is counted is in bf16"
        assert torch.equal(call(x), exact)


def test_a_method_that_contains_the_loop_is_not_counted(run, monkeypatch):
    monkeypatch.setattr(bf16_policy, "_Counting", None)
    x, layer = SMALL
    model, _ = run(layer)
    for _ in range(2):
        model.fit(x)
        assert model.seen is torch.bfloat16


def test_a_checkpoint_recomputes_in_the_precision_of_its_forward(run):
    x, layer = SMALL
    model, _ = run(layer)
    seen = []
    for reentrant in (False, True):
        inputs = x.clone().requires_grad_()
        outputs = [checkpoint(model.layer, inputs, use_reentrant=reentrant) for _ in range(2)]
        for output in reversed(outputs):
            output.sum().backward()
            seen.append(inputs.grad)
            inputs.grad = None
    fp32, counted, *others = seen
    assert not torch.equal(counted, fp32)
    assert all(torch.equal(each, fp32) for each in others)


def test_bf16_stays_bf16_and_says_that_it_does_not_pay(run):
    x, layer = SMALL
    model, made = run(layer, precision="bf16")
    for _ in range(bf16_policy.CALLS_WORTH_SAYING + 1):
        model(x)
        assert model.seen is torch.bfloat16
    assert made.final_result() is None, "a few calls are not worth a line"
    model(x)
    assert made.final_result().status == "applied"
    assert 'precision="auto"' in made.final_result().detail


def test_bf16_that_pays_for_one_size_says_nothing(run):
    model, made = run(nn.Linear(256, 512), precision="bf16")
    for rows in (512, 512, *[8] * 102):
        model(torch.zeros(rows, 256))
    assert made.final_result() is None


def test_a_call_without_products_stays_as_it_was_asked_for(run):
    x, layer = WITHOUT_PRODUCTS
    _, made = run(layer)
    assert made.final_result() is None, "a model that was not called is not judged"
    model, made = run(layer)
    model(x)
    assert made.final_result() is None


@pytest.mark.usefixtures("compiles_anew")
def test_compiled_models_and_torch_func_are_not_counted(run, monkeypatch):
    monkeypatch.setattr(bf16_policy, "_Counting", None)
    x, layer = SMALL
    model, _ = run(torch.compile(layer, backend="eager"))
    model(x)
    model, _ = run(layer)
    torch.func.vmap(model)(x[None])
    model, _ = run(layer, compile=True)
    model(x)


@pytest.mark.skipif(not can_train_lstms(torch.bfloat16), reason="torch has no LSTM in bf16 for this CPU")
def test_an_lstm_can_be_evaluated_in_inference_mode(run):
    model, _ = run(nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)))
    x = torch.ones(3, 2, 8)
    with torch.inference_mode():  # a counted call would have inputs of two dtypes, for which oneDNN has no LSTM
        first, *later = (model(x)[0] for _ in range(4))
    assert all(torch.equal(each, first) for each in later)


@pytest.mark.usefixtures("compiles_anew")
def test_a_compiled_function_that_a_counted_model_calls_stays_compiled(run):
    def backend(graph, inputs):
        return lambda *args: ran.append(1) or graph(*args)

    class Compiling(nn.Module):
        def forward(self, x):
            return function(x @ x)

    ran, function = [], torch.compile(torch.relu, backend=backend)
    model, _ = run(Compiling())
    for count in (1, 2, 3):
        model(SMALL[0])
        assert len(ran) == count


def test_narrow_products_gain_less_than_their_casts():
    def gain(rows, inputs, outputs):
        x, weight = torch.zeros(rows, inputs).bfloat16(), torch.zeros(inputs, outputs).bfloat16()
        return bf16_policy.gain(torch.ops.aten.mm, (x, weight), x @ weight)

    assert gain(4096, 256, 256) > 0 > gain(4096, 256, 8)
    assert gain(64, 64, 64) < 0


def test_a_verdict_is_of_one_kind_of_call():
    model, x = nn.Linear(2, 2), torch.zeros(3, 2)
    judged = Bf16Policy(model)
    kind = kind_of(nn.Module.__call__, (model, x), {})
    assert judged.of(kind) is None
    with judged.counting(nn.Module.__call__, kind), torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert judged.of(kind) is False
    assert judged.of(kind_of(nn.Module.__call__, (model, x), {"more": [torch.zeros(99)]})) is None
    assert not judged.never
