"""A model's last activation is computed in fp32, however it is written; inner activations stay bf16."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop.precision.autocast import output_activations
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.precision import Precision


class Ending(nn.Module):
    """A linear layer, and the end of the model."""

    def __init__(self, end):
        super().__init__()
        self.layer, self.end = nn.Linear(3, 4), end

    def forward(self, x):
        return self.end(self.layer(x))


@pytest.fixture
def ending(step):
    def make(end, **options):
        torch.manual_seed(0)
        model = Ending(end)
        step(Precision, precision="bf16", **options).apply(TrainingObjects([model]))
        return model

    return make


X = torch.linspace(-40, 40, 30).reshape(10, 3)
ENDS = {
    "sigmoid module": nn.Sigmoid(),
    "sequential": nn.Sequential(nn.Sigmoid(), nn.Flatten()),
    "sigmoid": torch.sigmoid,
    "sigmoid method": lambda h: h.sigmoid(),
    "expit": torch.special.expit,
    "softmax module": nn.Softmax(dim=1),
    "softmax": lambda h: F.softmax(h, 1),
    "log_softmax": lambda h: h.log_softmax(-1),
    "logsigmoid": F.logsigmoid,
    "tanh": nn.Tanh(),
    "exp": lambda h: h.div(8).exp(),
    "log of softmax": lambda h: h.softmax(1).log(),
    "clamped": lambda h: torch.sigmoid(h).clamp(1e-6, 1 - 1e-6),
    "complement": lambda h: 1 - torch.sigmoid(h),
    "logarithm of the complement": lambda h: (1 - torch.sigmoid(h)).clamp(min=1e-9).log(),
    "one column": lambda h: torch.sigmoid(h)[:, 1],
    "squeezed": lambda h: torch.sigmoid(h[:, :1]).squeeze(1),
    "logarithm of a column": lambda h: torch.sigmoid(h)[:, 2].log(),
    "softmax in the dtype of its input": lambda h: F.softmax(h, 1, dtype=h.dtype),
    "log_softmax in the dtype of its input": lambda h: h.log_softmax(1, h.dtype),
    "masked softmax": lambda h: torch.masked.softmax(h, 1),
    "of a column": lambda h: torch.sigmoid(h[:, 1:3])[:, 1],
    "of a transposed": lambda h: torch.sigmoid(h.t()),
}


def by_hand(model, x):
    """Return the model's output with only the linear layer in bf16."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.layer(x)
    return model.end(hidden.float())


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_end_of_a_model_is_computed_in_fp32(ending, end):
    model = ending(end)
    out, expected = model(X), by_hand(model, X)
    assert torch.equal(out, expected)
    assert out.stride() == expected.stride()
    weight = torch.rand(out.shape)
    model.zero_grad()
    (out * weight).sum().backward()
    gradient = model.layer.weight.grad.clone()
    model.zero_grad()
    (expected * weight).sum().backward()
    torch.testing.assert_close(gradient, model.layer.weight.grad, rtol=1e-2, atol=1e-3)
    with torch.no_grad():
        assert torch.equal(model(X), expected)
    with torch.inference_mode():
        assert torch.equal(model(X), expected)


def test_several_outputs_each_come_in_fp32(ending):
    model = ending(lambda h: {"heads": [torch.sigmoid(h), F.softmax(h, 1)], "logits": h, "hard": h > 0})
    out, expected = model(X), by_hand(model, X)
    assert all(map(torch.equal, (*out["heads"], out["logits"]), (*expected["heads"], expected["logits"])))
    assert out["hard"].dtype is torch.bool


def test_inside_the_model_activations_stay_bf16(ending):
    seen = []

    def gated(h):
        gate = torch.sigmoid(h)
        seen.append(gate.dtype)
        return h * gate

    model = ending(gated)
    out = model(X)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.layer(X)
        assert torch.equal(out, (hidden * torch.sigmoid(hidden)).float())
    assert seen == [torch.bfloat16]


CHANGED = {
    "the result": lambda h: torch.sigmoid(h).mul_(2),
    "a view of the result": lambda h: (y := torch.sigmoid(h), y[0].zero_())[0],
    "the input": lambda h: (torch.tanh(h), h.zero_())[0],
    "the result, in place": lambda h: h.sigmoid_(),
}


@pytest.mark.parametrize("end", CHANGED.values(), ids=CHANGED)
def test_result_that_was_written_to_is_the_one_that_is_returned(ending, end):
    model = ending(end)
    with torch.autocast("cpu", torch.bfloat16):
        expected = end(model.layer(X)).float()
    out = model(X)
    assert torch.equal(out, expected)
    assert out.requires_grad == expected.requires_grad
    with torch.inference_mode():
        assert torch.equal(model(X), expected)


def test_operator_on_a_result_that_was_written_to_computes_with_what_was_written(ending):
    model = ending(lambda h: torch.sigmoid(h).add_(1).log())
    with torch.autocast("cpu", torch.bfloat16):
        written = torch.sigmoid(model.layer(X)).add_(1)
    assert torch.equal(model(X), written.float().log())


def test_detached_result_stays_detached(ending):
    model = ending(lambda h: (torch.sigmoid(h), torch.sigmoid(h).detach()))
    kept, detached = model(X)
    assert torch.equal(kept, detached)
    assert (kept.requires_grad, detached.requires_grad) == (True, False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_flow_through_a_checkpointed_end(ending, reentrant):
    model = ending(lambda h: checkpoint(torch.sigmoid, h, use_reentrant=reentrant))
    expected = by_hand(model, X)
    weight = torch.rand(expected.shape)
    expected.backward(weight)
    gradient = model.layer.weight.grad.clone()
    model.zero_grad()
    model(X).backward(weight)
    torch.testing.assert_close(model.layer.weight.grad, gradient, rtol=2e-2, atol=2e-2)


class Scaled(torch.autograd.Function):
    """Returns its input and multiplies gradients by 100."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 100 * gradient


def hooked(result):
    result.register_hook(lambda gradient: 100 * gradient)
    return result


def with_hooked_backward(module):
    module.register_full_backward_hook(lambda module, of_inputs, of_outputs: (100 * of_inputs[0],))
    return module


@pytest.mark.parametrize(
    "end",
    [
        lambda h: hooked(torch.sigmoid(h)),
        lambda h: hooked(torch.sigmoid(h))[:, 1],
        lambda h: hooked(h.softmax(1)).log(),
        lambda h: Scaled.apply(torch.tanh(h)),
        lambda h: Scaled.apply(torch.tanh(h)).flatten(),
        with_hooked_backward(nn.Sigmoid()),
    ],
    ids=["hook", "hook, and a view", "hook inside", "function", "function, and a view", "hook of the module"],
)
def test_what_the_program_puts_behind_an_activation_changes_its_gradient(ending, end):
    model, x = ending(end), X / 40
    expected = by_hand(model, x)
    torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-3)
    (wanted,) = torch.autograd.grad(expected.square().sum(), [model.layer.weight])
    (gradient,) = torch.autograd.grad(model(x).square().sum(), [model.layer.weight])
    torch.testing.assert_close(gradient, wanted, rtol=5e-2, atol=5e-2 * wanted.abs().max().item())


def test_gradient_of_an_activation_is_retained(ending):
    kept = []

    def end(hidden):
        kept.append(torch.sigmoid(hidden))
        kept[-1].retain_grad()
        return kept[-1]

    ending(end)(X).sum().backward()
    assert torch.equal(kept[-1].grad, torch.ones_like(kept[-1]))


def test_per_sample_gradients_are_those_of_autocast(ending):
    model = ending(nn.Sigmoid())
    parameters = dict(model.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x,)).sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, X)
    assert found["layer.weight"].shape == (10, 4, 3)


def test_autocast_of_others_is_as_torch_has_it(ending):
    ending(nn.Sigmoid())
    hidden = torch.rand(3, 3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.sigmoid(hidden).dtype is F.softmax(hidden, 1).dtype is torch.bfloat16
        assert F.softmax(hidden, 1, dtype=torch.float32).dtype is torch.float32


def test_no_more_inputs_are_kept_than_the_bound(monkeypatch):
    monkeypatch.setattr(output_activations, "MOST_ELEMENTS", 3 * 12)
    kept = output_activations.Activations()
    inputs = [torch.rand(3, 4).bfloat16() for _ in range(9)]
    results = []
    for each in inputs:
        results.append(torch.sigmoid(each))
        kept.note(torch.ops.aten.sigmoid.default, each, (), results[-1])
    rounded = [torch.equal(kept.in_fp32(each), each.float()) for each in results]
    assert rounded == [True] * 6 + [False] * 3


@pytest.mark.usefixtures("compiles_anew")
def test_compiled_model_is_left_as_it_is(ending):
    model = ending(nn.Sigmoid())
    model.compile(backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.forward(X).float()
    torch.testing.assert_close(model(X), expected, rtol=1e-2, atol=1e-2)
