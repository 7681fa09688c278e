"""Images, and the weights applied to them, have the NHWC layout during a run."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from nano_loop import accelerated, nano
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.channels_last import ChannelsLast


def is_nhwc(tensor):
    """Whether an image or a volume has this layout, for shapes in which NCHW has other strides."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.is_contiguous(memory_format=formats[tensor.dim()]) and not tensor.is_contiguous()


class Nested(nn.Module):
    """Expects an image in a dict."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, batch, *, mask):
        assert is_nhwc(mask)
        return self.convolution(batch["image"])


class Decoder(nn.Module):
    """Creates the input of the next convolution in `forward`."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.ConvTranspose2d(4, 3, 2)

    def forward(self, latent):
        return self.convolution(latent.view(-1, 4, 2, 2))


@pytest.mark.parametrize(
    ("make", "args", "named", "of_layer"),
    [
        (Nested, [{"image": torch.rand(2, 3, 6, 6)}], {"mask": torch.rand(2, 3, 6, 6)}, "input"),
        (lambda: nn.Conv2d(1, 4, 3), [torch.rand(2, 1, 6, 6)], {}, "output"),
        (Decoder, [torch.rand(5, 16)], {}, "output"),
        (lambda: nn.Conv3d(2, 3, 2), [torch.rand(1, 2, 4, 4, 4)], {}, "input"),
        (lambda: nn.AvgPool2d(2), [torch.rand(2, 3, 4, 4)], {}, "input"),
    ],
    ids=["nested", "one channel", "made inside", "volume", "no convolution"],
)
def test_images_are_nhwc_inside_and_as_the_caller_has_them_outside(step, make, args, named, of_layer):
    model, seen = make(), {}
    step(ChannelsLast, channels_last=True).apply(TrainingObjects([model]))
    layer = getattr(model, "convolution", model)
    layer.register_forward_hook(lambda module, args, out: seen.update(input=args[0], output=out))
    assert model(*args, **named).is_contiguous()
    assert is_nhwc(seen[of_layer])
    given = args[0]["image"] if isinstance(args[0], dict) else args[0]
    assert given.is_contiguous()


class Returning(nn.Module):
    """Returns its input, too."""

    def __init__(self, change):
        super().__init__()
        self.convolution, self.change = nn.Conv2d(3, 4, 3), change

    def forward(self, x):
        return self.convolution(self.change(x)), {"input": x, "again": [x]}


@pytest.mark.parametrize(
    "change",
    [lambda x: x, lambda x: x.clone(), lambda x: x.mul_(2).clone(), lambda x: x[:, :1].zero_().expand(-1, 3, -1, -1)],
    ids=["unchanged", "copied", "doubled in place", "a channel cleared in place"],
)
def test_input_that_a_model_returns_is_the_caller_s(step, change):
    model, x, other = Returning(change), torch.rand(2, 3, 6, 6), torch.rand(2, 3, 6, 6).requires_grad_()
    expected = x.clone()
    change(expected)
    step(ChannelsLast, channels_last=True).apply(TrainingObjects([model]))
    _, kept = model(x)
    assert kept["input"] is kept["again"][0] is x
    assert torch.equal(x, expected)
    hidden, plain = other * 1, other * 1
    _, kept = model(hidden)
    assert torch.equal(hidden, kept["input"])
    kept["input"].sum().backward()
    change(plain)
    assert torch.equal(other.grad, torch.autograd.grad(plain.sum(), other)[0])


class Normed(nn.Module):
    """A convolution with a residual sum, or with a layer norm over its channels."""

    def __init__(self, permutes):
        super().__init__()
        self.permutes = permutes
        self.convolution, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.LayerNorm(8)

    def forward(self, x):
        y = self.convolution(x)
        return self.norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if self.permutes else y.relu() + x


@pytest.mark.parametrize("of_caller", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("permutes", [False, True], ids=["sum", "permuted"])
def test_outputs_have_the_strides_of_the_plain_loop(step, permutes, of_caller):
    model, x = Normed(permutes), torch.rand(2, 8, 6, 5).contiguous(memory_format=of_caller)
    expected = model(x)
    step(ChannelsLast, channels_last=True).apply(TrainingObjects([model]))
    found = model(x)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)


def test_view_that_is_wrong_in_any_layout_raises_what_torch_raises(step):
    step(ChannelsLast, channels_last=True).apply(TrainingObjects([nn.Conv2d(1, 1, 1)]))
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        torch.ones(2, 3).view(5)
    with pytest.raises(RuntimeError, match=r"self.stride\(-1\) must be 1"):
        torch.ones(2, 3).T.view(torch.int16)


@pytest.mark.parametrize(
    ("model", "choice", "code"),
    [
        (nn.GRU(2, 2), True, "no_images"),
        (nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2)), True, "no_images"),
        (nn.Linear(2, 2), "auto", "no_images"),
        (nn.Linear(2, 2), True, "no_images"),
        (nn.ParameterList([torch.zeros(1, 2, 3, 3)]), True, "no_images"),
        (nn.AvgPool2d(2), True, None),
        (type("Layer", (nn.Conv2d,), {})(1, 1, 1), True, None),
        (nn.AvgPool2d(2), "auto", "no_images"),
    ],
)
def test_model_without_images_is_skipped(step, model, choice, code):
    made = step(ChannelsLast, channels_last=choice)
    reason = made.skip_reason(TrainingObjects([model]))
    assert (None if reason is None else reason.code) == code
    assert not made.required


@pytest.mark.parametrize("kind", [nn.Linear, nn.GRU])
def test_model_without_images_trains_with_the_option_and_the_report_says_why_it_has_no_effect(kind):
    """As for torch's own memory format, it is no error."""
    model = kind(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with accelerated(model, optimizer, channels_last=True, verbose=False) as run:
        output = model(torch.ones(2, 2))
        (output if kind is nn.Linear else output[0]).sum().backward()
        optimizer.step()
    assert (run.report["channels_last"].status, run.report["channels_last"].code) == ("skipped", "no_images")


@pytest.mark.parametrize("precision", [32, "bf16"])
@pytest.mark.parametrize("kind", [(nn.Conv2d, (2, 3, 8, 8)), (nn.Conv2d, (2, 3, 3, 3)), (nn.Conv3d, (2, 3, 4, 8, 8))])
@pytest.mark.parametrize("call", [nn.GroupNorm.forward, lambda norm, x: torch.group_norm(x, 2, norm.weight, norm.bias)])
def test_a_group_norm_behind_frozen_layers_trains(precision, kind, call, monkeypatch):
    """torch's backward of a group norm in NHWC crashes the process if the input needs no gradient."""
    convolution, shape = kind
    monkeypatch.setattr(nn.GroupNorm, "forward", call)
    torch.manual_seed(0)
    model = nn.Sequential(convolution(3, 16, 3), nn.GroupNorm(2, 16), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(shape)
    model(x)
    model[0].requires_grad_(False)

    def train(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    plain = copy.deepcopy(model)
    train(plain, torch.optim.SGD(plain.parameters(), lr=1e-3))
    accelerated = nano(precision=precision, channels_last=True, verbose=False)(train)
    accelerated(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if precision == 32 else {"rtol": 0.05, "atol": 0.01}
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


class Noisy(nn.Module):
    """A parametrization that counts, and draws a random number."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * (1 + 0.1 * torch.rand(()))


def with_noise(layer):
    return register_parametrization(layer, "weight", Noisy())


def calls_of(model):
    return [module.calls for module in model.modules() if isinstance(module, Noisy)]


@pytest.mark.parametrize("parametrized", [spectral_norm, weight_norm, with_noise])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d])
def test_parametrized_weights_are_computed_once_a_call(parametrized, kind):
    """A spectral norm iterates whenever its weight is read, and others draw random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(parametrized(kind(3, 16, 3)), nn.Tanh(), parametrized(kind(16, 3, 3)))
    x = torch.randn(2, 3, *[8] * (model[0].weight.dim() - 2))

    def train(model, optimizer):
        torch.manual_seed(1)
        for _ in range(2):
            optimizer.zero_grad()
            (model(x).square() + model(-x).abs()).sum().backward()
            optimizer.step()
        return torch.rand(3).tolist()

    plain = copy.deepcopy(model)
    drawn = train(plain, torch.optim.SGD(plain.parameters(), lr=1e-3))
    accelerated = nano(channels_last=True, verbose=False)(train)
    assert accelerated(model, torch.optim.SGD(model.parameters(), lr=1e-3)) == drawn
    assert calls_of(model) == calls_of(plain)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [nn.Embedding(8, 4, sparse=True), nn.EmbeddingBag(8, 4, sparse=True)])
def test_parametrized_weights_are_not_computed_by_the_setup(layer):
    model = nn.Sequential(nn.Sequential(with_noise(layer)), nn.Linear(4, 4))
    before = calls_of(model)
    nano(verbose=False)(lambda model, optimizer: None)(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert calls_of(model) == before


class Marked(torch.Tensor):
    """A tensor subclass like those of torchvision's transforms."""


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}])
def test_batched_tensors_and_subclasses_compute_as_in_the_plain_loop(options):
    def outputs(model):
        images = torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        one = torch.func.functional_call
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(parameters, image):
            return one(model, parameters, (image[None],)).sum()

        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, images[0])
        return torch.func.vmap(model)(images), gradients["0.weight"], model(images[0].as_subclass(Marked))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))
    expected = outputs(model)
    for output, exact in zip(nano(channels_last=True, verbose=False, **options)(outputs)(model), expected, strict=True):
        torch.testing.assert_close(output, exact, rtol=0.05, atol=0.1)
