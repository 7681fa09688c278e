"""Runs in bf16 compute LSTMs in C, forward and backward, for the calls of set-up models alone."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from nano_loop import nano
from nano_loop.kernels.rnn import lstm, lstm_layer
from nano_loop.patching.operators.operators import gives_kernels

pytestmark = [
    pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9"),
    pytest.mark.skipif(lstm_layer.KERNEL.unavailable is not None, reason=str(lstm_layer.KERNEL.unavailable)),
]
SIZE, STEPS, BATCH = 24, 10, 12


class Sequences(nn.Module):
    """An LSTM and a layer for its last output."""

    def __init__(self, reentrant=None, **options):
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.lstm, self.reentrant = nn.LSTM(SIZE, 32, batch_first=True, **options), reentrant
        self.last = nn.Linear(32 * (2 if self.lstm.bidirectional else 1), 1)

    def forward(self, x):
        x = self.first(x)
        if self.reentrant is None:
            return self.last(self.lstm(x)[0][:, -1])
        return self.last(checkpoint(lambda x: self.lstm(x)[0], x, use_reentrant=self.reentrant)[:, -1])


MODELS = {
    "one layer": {},
    "no biases": {"bias": False},
    "two layers in both directions": {"num_layers": 2, "bidirectional": True},
    "checkpointed": {"reentrant": False},
    "checkpointed, reentrant": {"reentrant": True},
}


@pytest.fixture(autouse=True)
def computed(monkeypatch):
    """Count the layers in C, and let all be large enough."""
    calls, original = [], lstm_layer.lstm
    monkeypatch.setattr(lstm, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(lstm_layer.KERNEL, "is_first_guess", True)
    monkeypatch.setattr(lstm_layer, "lstm", lambda given: calls.append(given) or original(given))
    return calls


def built(name="one layer"):
    torch.manual_seed(0)
    return Sequences(**MODELS[name])


def sequences():
    return torch.randn(BATCH, STEPS, SIZE, generator=torch.Generator().manual_seed(1))


def loop(model, optimizer, steps=3):
    """Train, and return the gradients of all steps."""
    x, found = sequences(), []
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x).float().squeeze(1) - x[:, :, 0].sum(1)).square().mean().backward()
        found.append([each.grad.clone() for each in model.parameters()])
        optimizer.step()
    return found


def trained(model, loop=loop, **options):
    train = nano(**{"precision": "bf16", "verbose": False, "tune_operators": False, **options})(loop)
    return train(model, torch.optim.SGD(model.parameters(), 0.1)), train


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_gradients_are_those_of_onednn(computed, name, precision):
    theirs, _ = trained(built(name), precision=precision, fast_lstm=False)
    assert not computed
    ours, train = trained(built(name), precision=precision)
    assert train.report["fast_lstm"].status == "applied"
    layers = {"two layers in both directions": 4, "checkpointed": 2, "checkpointed, reentrant": 2}.get(name, 1)
    assert len(computed) == 3 * layers
    # In bf16-true, steps after the first begin with other roundings of the parameters.
    for mine, onednns in [*zip(ours, theirs, strict=True)][: 1 if precision == "bf16-true" else None]:
        for a, b in zip(mine, onednns, strict=True):
            assert (a - b).float().norm() <= 0.02 * b.float().norm()


def test_fp32_and_other_models_are_torchs_to_the_bit(computed):
    plain = built()
    exact = loop(plain, torch.optim.SGD(plain.parameters(), 0.1))
    found, train = trained(built(), precision=32)
    assert "fast_lstm" not in str(train.report)
    assert all(torch.equal(a, b) for x, y in zip(found, exact, strict=True) for a, b in zip(x, y, strict=True))

    def outside(model, optimizer):
        other = built()
        with torch.autocast("cpu", torch.bfloat16):
            return other(sequences())

    with torch.autocast("cpu", torch.bfloat16):
        expected = built()(sequences())
    assert torch.equal(trained(built(), outside)[0], expected)
    assert not computed


def test_backward_after_the_run_has_the_gradients_of_its_forward(computed):
    def forward_only(model, optimizer):
        return model(sequences()).sum()

    def whole(model, optimizer):
        forward_only(model, optimizer).backward()

    first, second = built(), built()
    loss, _ = trained(first, forward_only)
    assert len(computed) == 1
    loss.backward()  # torch's kernel would read what ours has kept
    trained(second, whole)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    computed.clear()
    with torch.autocast("cpu", torch.bfloat16):
        first(sequences()).sum().backward()
    assert not computed


def test_shapes_of_torchs_decomposition_are_torchs(computed):
    class Decomposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.LSTM(SIZE, 32)

        def forward(self, x):
            state = x.new_zeros(1, x.size(1), 32)  # with a dimension more than in a call of `nn.LSTM`
            weights = [each.detach().bfloat16() for each in self.inner.parameters()]
            numbers = False, [], 2, 32, 1, True, False, False, False
            return torch.ops.aten.mkldnn_rnn_layer(x, *weights, state, state, *numbers)[0]

    def outputs(model, optimizer):
        with torch.no_grad():
            return model(sequences().transpose(0, 1).contiguous().bfloat16()).float()

    found, theirs = trained(Decomposed(), outputs)[0], trained(Decomposed(), outputs, fast_lstm=False)[0]
    assert found.shape == theirs.shape == (STEPS, BATCH, 32)
    assert not computed


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_other_calls_are_torchs(computed):
    class Others(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.projected = nn.LSTM(SIZE, 33), nn.LSTM(SIZE, 32, proj_size=16)
            self.usual, self.gru = nn.LSTM(SIZE, 32), nn.GRU(SIZE, 32)

        def forward(self, x):
            packed = self.usual(pack_sequence([x[:5, 0], x[:3, 1]]))[0].data
            found = [self.odd(x)[0], self.projected(x)[0], self.usual(x[:2])[0], self.gru(x)[0], packed]
            return sum(each.float().square().sum() for each in found)

    def uses(model, optimizer):
        loss = model(sequences())
        loss.backward()
        return loss.item(), [each.grad for each in model.parameters()]

    def found(**options):
        torch.manual_seed(0)
        return trained(Others(), uses, **options)[0]

    (loss, gradients), (expected, theirs) = found(), found(fast_lstm=False)
    assert loss == expected
    assert all(torch.equal(a, b) for a, b in zip(gradients, theirs, strict=True))
    assert not computed


def test_evaluation_functional_gradients_and_inference_are_right(computed):
    def uses(model, optimizer):
        x = sequences()
        parameters = {name: each.detach() for name, each in model.named_parameters()}

        def of(parameters):
            return torch.func.functional_call(model, parameters, x).float().square().sum()

        functional = torch.func.grad(of)(parameters)
        with torch.no_grad():
            evaluated = model(x).float()
        with torch.inference_mode():
            inferred = model(x).float()
        return [*functional.values(), evaluated, inferred.clone()]

    ours = trained(built(), uses)[0]
    assert len(computed) == 1  # without gradients
    for a, b in zip(ours, trained(built(), uses, precision=32)[0], strict=True):
        assert (a.float() - b.float()).norm() < 0.05 * b.float().norm()
