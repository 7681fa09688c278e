"""Ways into a model other than calling it: submodules, custom methods, indexing, hooks, the user's casts."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, softsign

from nano_loop import disable_casts, nano

from .pairs import CONVOLUTIONS, FP64, ROUNDED, pair, untouched
from .tasks import ADAMW, ConvNet, Net, entropy, fit, images, job, steps, train, vectors


class Watching(nn.Linear):
    """A linear layer that records its output's dtype, and whether autocast was enabled."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.saw = []

    def forward(self, x):
        out = super().forward(x)
        self.saw.append((out.dtype, torch.is_autocast_enabled("cpu")))
        return out


class Autoencoder(nn.Module):
    """Its codes are outputs, too, so their activation is not part of the fp32 computation of a model's output."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(Watching(6, 4), nn.Softsign())
        self.decoder = Watching(4, 6)

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def my_loss(self, x, target, scale=1.0):
        return {"loss": scale * mse_loss(self(x), target), "code": self.encoder(x)}

    def encode(self, x):
        return softsign(self.encoder[0](x))

    def training_step(self, batch):
        return self.my_loss(*batch, scale=2.0)["loss"]

    @property
    def layers(self):
        return [self.encoder[0], self.decoder]


@pair(job(model=Autoencoder, optimizer=ADAMW, loader=lambda: vectors(shuffle=False)))
def test_submodules_and_methods_called_by_the_loop(model, optimizer, loader, by_hand=untouched):
    results = []
    for x, _ in steps(loader, optimizer):
        code = by_hand(model.encoder)(x)
        out = by_hand(model.decoder)(code)
        found = by_hand(model.my_loss)(x, x, scale=0.5)
        loss = by_hand(model.training_step)((x, x)) + by_hand(model.encode)(x).abs().mean()
        (mse_loss(out, x) + found["loss"] + loss + mse_loss(by_hand(model.forward)(x), x)).backward()
        results += [code, out, found, loss]
    return results, [layer.saw for layer in model.layers]


def sequential():
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 3))


@pair(job(model=sequential), without=[FP64])
def test_a_sequential_model_indexed_sliced_and_walked(model, optimizer, loader, by_hand=untouched):
    outputs = [len(model), [type(layer).__name__ for layer in model]]
    for x, y in steps(loader, optimizer):
        features = by_hand(model[:-1])(x) + by_hand(model[0])(x)
        for layer in model[1]:
            features = by_hand(layer)(features)
        out = by_hand(model[-1])(features)
        cross_entropy(out, y).backward()
        outputs += [features, out]
    return outputs


@pair(job())
def test_hooks_of_the_user_on_modules(model, optimizer, loader, by_hand=untouched):
    seen = []
    model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.register_forward_hook(lambda m, args, out: out + 1)
    inner = model.encoder[0].register_forward_hook(lambda m, args, out: seen.append(out.clone()))
    model.head.register_full_backward_hook(lambda m, inputs, outputs: seen.append(outputs[0].clone()))
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    losses = fit(model, optimizer, loader, by_hand, epochs=1)
    inner.remove()
    return losses, seen, fit(model, optimizer, loader, by_hand, epochs=1)


class WithFp32Part(nn.Module):
    """Keeps a sensitive part out of any surrounding autocast, and runs another part under its own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Watching(6, 8), Watching(8, 3)
        self.delicate = Watching(8, 8)

    def forward(self, x):
        x = self.first(x)
        with self.region():
            x = self.delicate(x.float()).exp().clamp(max=3)
        return self.last(x)

    def region(self):
        return torch.autocast("cpu", enabled=False)


class WithDisabledCasts(WithFp32Part):
    def region(self):
        return disable_casts()


@pair(job("autocast", model=WithFp32Part), job("disable_casts", model=WithDisabledCasts), kernels_in_bf16=True)
def test_an_fp32_region_of_the_users_inside_forward(model, optimizer, loader, by_hand=untouched):
    losses = fit(model, optimizer, loader, by_hand)
    return losses, model.first.saw, model.delicate.saw, model.last.saw


@pair(job(model=Autoencoder))
def test_autocast_of_the_user_around_the_loops_calls(model, optimizer, loader, by_hand=untouched):
    """The user's own autocast works as usual, whatever the precision, and the outputs keep its dtype."""
    outputs = []
    for x, _ in steps(loader, optimizer):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(model(x))
        mse_loss(outputs[-1].float(), x).backward()
    return outputs, [layer.saw for layer in model.layers]


@pair(job(model=Autoencoder), without=ROUNDED)  # casts are autocast's
def test_disable_casts_around_the_loops_calls(model, optimizer, loader, by_hand=untouched):
    """Without `by_hand`: the code inside runs in plain fp32."""
    outputs = []
    for x, _ in loader:
        for _ in steps([x], optimizer):
            with disable_casts():
                outputs += [model(x), model.my_loss(x, x)["loss"]]
            mse_loss(outputs[-2], x).backward()
        outputs.append(by_hand(model.encoder)(x))
    return outputs, [layer.saw for layer in model.layers]


def two_models_with_one_part():
    body = nn.Linear(6, 8)
    models = {"first": nn.Sequential(body, nn.ReLU(), nn.Linear(8, 3)), "second": nn.Sequential(body, nn.Linear(8, 3))}
    parameters = {id(p): p for model in models.values() for p in model.parameters()}
    return {**models, "optimizer": torch.optim.Adam(parameters.values(), lr=0.01), "loader": vectors()}


@pair(two_models_with_one_part)
def test_a_module_shared_between_two_models(first, second, optimizer, loader, by_hand=untouched):
    return train(lambda *batch: sum(entropy(by_hand(model))(*batch) for model in (first, second)), loader, optimizer)


def a_model_and_its_part():
    model = Net()
    return {"model": model, "encoder": model.encoder, "optimizer": ADAMW(model.parameters()), "loader": vectors()}


@pair(a_model_and_its_part)
def test_a_model_and_its_part_both_among_the_arguments(model, encoder, optimizer, loader, by_hand=untouched):
    assert model.encoder is encoder
    return by_hand(encoder)(torch.ones(2, 6)), fit(model, optimizer, loader, by_hand)


class SplitNet(ConvNet):
    def halves(self, x):
        return self.features(x).chunk(2, 1)


@pair(job(model=SplitNet, loader=images), configs=CONVOLUTIONS)
def test_convolutional_parts_called_directly(model, optimizer, loader, by_hand=untouched):
    maps = []
    for x, y in steps(loader, optimizer):
        features = by_hand(model.features)(x)
        first, _ = by_hand(model.halves)(x)
        loss = cross_entropy(by_hand(model.head)(features.flatten(1)), y) + first.square().mean()
        loss.backward()
        maps += [features, first]
    return maps


@pair(job())
def test_a_module_added_and_one_replaced_inside_the_loop(model, optimizer, loader, by_hand=untouched):
    losses = fit(model, optimizer, loader, by_hand, epochs=1)
    model.encoder.append(nn.Linear(16, 16))
    model.head = Watching(16, 3)
    optimizer.add_param_group({"params": [*model.encoder[-1].parameters(), *model.head.parameters()]})
    return losses, fit(model, optimizer, loader, by_hand, epochs=1), model.head.saw


class Agent(Net):
    """Trains itself: a method of the model holds the loop, as is common for agents in reinforcement learning."""

    def update(self, optimizer, batches, by_hand):
        return train(entropy(by_hand(self)), batches, optimizer)


@pair(job("sgd", model=Agent), job("adamw", model=Agent, optimizer=ADAMW), without=[FP64])
def test_a_method_of_the_model_that_holds_the_loop(model, optimizer, loader, by_hand=untouched):
    """Under one autocast around the method, each step would compute with the weights of the first."""
    return [model.update(optimizer, loader, by_hand) for _ in range(2)]


@pair(job())
def test_a_module_of_the_loops_own_is_left_alone(model, optimizer, loader, by_hand=untouched):
    """A head created by the loop is not part of the model, so it runs plain."""
    probe = Watching(16, 3)
    train(entropy(lambda x: probe(by_hand(model.encoder)(x))), loader, optimizer)
    return probe.saw


class Tabled(nn.Module):
    """Looks attributes up in its own table, whose error is not AttributeError."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.names = {"width": 3}

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        modules = vars(self).get("_modules", {})
        return modules[name] if name in modules else vars(self)["names"][name]

    def forward(self, x):
        return self.layer(x)[:, : self.width]


test_models_whose_attributes_raise_errors_of_their_own = pair(job(model=Tabled))(fit)


LAZY = {
    "fp32": {},
    "exact": {"exact": True},
    "products": {"precision": "auto"},
    "bf16": {"precision": "bf16"},
    "bf16-true": {"precision": "bf16-true"},
    "64": {"precision": 64},
    "channels_last": {"channels_last": True},
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("options", LAZY.values(), ids=LAZY)
def test_layers_that_their_first_call_in_the_run_builds(options):
    def trained(train):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))
        optimizer, unused, inputs = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.LazyLinear(2),
            torch.rand(8, 3, 6, 6),
        )
        return train(model, optimizer, unused, inputs), model.state_dict()

    def train(model, optimizer, unused, inputs):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
        return loss.detach(), unused.has_uninitialized_params()

    expected = trained(train)
    found = trained(nano(**options, verbose=False)(train))
    atol = 0 if "exact" in options else 0.02 if "bf16" in str(options.get("precision")) else 1e-5
    torch.testing.assert_close(found, expected, rtol=atol, atol=atol)
