"""Runs in bf16 compute LSTMs in C, forward and backward; see `test_training`, too."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from nano_loop import nano
from nano_loop.kernels.rnn import lstm_layer
from nano_loop.steps.kernels import FastLstm
from steps.kernels.cases import LSTMS, SEQUENCES, SIZE, STEPS, sequences, use_for_all_sizes


@pytest.fixture(autouse=True)
def computed(monkeypatch):
    """Count the layers in C, and let all be large enough."""
    calls, original = [], lstm_layer.lstm
    use_for_all_sizes(monkeypatch, FastLstm)
    monkeypatch.setattr(lstm_layer, "lstm", lambda given: calls.append(given) or original(given))
    return calls


def built():
    return LSTMS["one layer"].built()


def run(model, loop, **options):
    train = nano(**{"precision": "bf16", "verbose": False, "tune_operators": False, **options})(loop)
    return train(model, torch.optim.SGD(model.parameters(), 0.1)), train.report


def test_backward_after_the_run_has_the_gradients_of_its_forward(computed):
    def forward_only(model, optimizer):
        return model(sequences()).sum()

    def whole(model, optimizer):
        forward_only(model, optimizer).backward()

    first, second = built(), built()
    loss, _ = run(first, forward_only)
    assert len(computed) == 1
    loss.backward()  # torch's kernel would read what ours has kept
    run(second, whole)
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

    found, theirs = run(Decomposed(), outputs)[0], run(Decomposed(), outputs, fast_lstm=False)[0]
    assert found.shape == theirs.shape == (STEPS, SEQUENCES, 32)
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
        return run(Others(), uses, fast_rnn=False, **options)[0]

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

    ours = run(built(), uses)[0]
    assert len(computed) == 1  # without gradients
    for a, b in zip(ours, run(built(), uses, precision=32)[0], strict=True):
        assert (a.float() - b.float()).norm() < 0.05 * b.float().norm()
