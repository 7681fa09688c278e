"""channels_last=True in loops whose code depends on PyTorch's usual layout."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from nano_loop import nano

from .nested import differences
from .pairs import NHWC, Config, run_accelerated, run_plain, untouched
from .tasks import ConvNet, fit, images, job, steps

# Another layout sums in another order: a step differs by 1e-6, and a few steps of SGD stay below 1e-4.
LOOSE = Config("loose", NHWC.options, tolerance=1e-4)


class Flattening(ConvNet):
    """`view` requires a contiguous tensor, so under channels_last by hand this forward raises."""

    def forward(self, x):
        x = self.features(x)
        return self.head(x.view(x.size(0), -1))


def against_plain(model, loop, config=LOOSE):
    """Compare the accelerated loop with the same loop in the usual layout."""

    def with_untouched_calls(model, optimizer, loader, by_hand=untouched):
        return loop(model, optimizer, loader)

    build = job(model=model, loader=images)
    actual, _ = run_accelerated(build, with_untouched_calls, config)
    expected = run_plain(build, with_untouched_calls)
    found = [*differences(actual["seen"], expected["seen"], config.tolerance)]
    assert not found, "\n".join(found)


def plainest(model, optimizer, loader):
    return fit(model, optimizer, loader, untouched)


def views_in_the_loop(model, optimizer, loader):
    """Calls `view` on outputs, inputs, gradients and weights, as loops do that log norms or flatten by hand."""
    outputs = []
    for x, y in loader:
        optimizer.zero_grad()
        features = model.features(x)
        out = model.head(features.view(features.size(0), -1))
        loss = cross_entropy(out, y) + x.view(len(x), -1).mean()
        loss.backward()
        optimizer.step()
        gradient = torch.cat([p.grad.view(-1) for p in model.parameters()])
        outputs.append((out, gradient, torch.cat([p.detach().view(-1) for p in model.parameters()])))
    return outputs


def weights_through_a_vector(model, optimizer, loader):
    """Reads with `view`, and writes in another layout than that of the existing momentum."""
    plainest(model, optimizer, loader)
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector * 0.9, model.parameters())
    return vector, plainest(model, optimizer, loader)


def test_nothing_of_a_batch_is_changed_in_place():
    @nano(channels_last=True, precision="bf16", verbose=False)
    def train(model, batches):
        return [model(x) for x in batches]

    batches = [torch.randn(2, 3, 8, 8), torch.randn(3, 2, 8, 8).transpose(0, 1)]
    batches.append(torch.randn(2, 3, 8, 16)[..., ::2])
    strides, values = [x.stride() for x in batches], [x.clone() for x in batches]
    train(nn.Conv2d(3, 4, 3), batches)
    assert strides == [x.stride() for x in batches]
    assert all(torch.equal(x, value) for x, value in zip(batches, values, strict=True))


class InPlace(ConvNet):
    """Normalizes its input in place, so the loop's own batch changes with it."""

    def forward(self, x):
        x.sub_(x.mean((2, 3), keepdim=True))
        return super().forward(x)


def batches_after_the_call(model, optimizer, loader):
    outputs = []
    for x, y in steps(loader, optimizer):
        outputs.append((cross_entropy(model(x), y) + x.square().mean(), x))
        outputs[-1][0].backward()
    return outputs


WITH_FUSED_STEPS = replace(LOOSE, options={"channels_last": True})


@pytest.mark.parametrize(
    ("model", "loop", "config"),
    [
        (Flattening, plainest, LOOSE),
        (ConvNet, views_in_the_loop, LOOSE),
        (InPlace, batches_after_the_call, LOOSE),
        *((ConvNet, weights_through_a_vector, config) for config in (LOOSE, WITH_FUSED_STEPS)),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_loop_that_counts_on_the_usual_layout(model, loop, config):
    against_plain(model, loop, config)


def test_a_compiled_model_that_counts_on_the_usual_layout():
    """torch.compile has its own `view`, and reports the error, as with channels_last written by hand."""
    config = replace(LOOSE, options={"channels_last": True, "compile": {"backend": "eager"}})
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="Cannot view a tensor"):
        against_plain(Flattening, plainest, config)
    torch._dynamo.reset()
