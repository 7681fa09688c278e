"""verify=True compares the first batch, names differences, and changes nothing in the loop."""

import contextlib
import copy
import gc
import json

import pytest
import torch
from attending import Attending
from torch import nn
from torch.nn import functional as F

import nano_loop
from nano_loop import NanoWarning, TorchNano, nano
from nano_loop.kernels.attention import attention, blocked_attention


class Convolutional(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(True), nn.Flatten(), nn.Linear(1024, 3)
        )


def fit(model, optimizer, loader):
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        losses.append(loss.item())
    return losses


def parts(kind=Attending, steps=2):
    torch.manual_seed(0)
    model = kind()
    x = torch.randint(0, 20, (8 * steps, 12)) if kind is Attending else torch.randn(8 * steps, 3, 8, 8)
    data = torch.utils.data.TensorDataset(x, torch.randint(0, 3, (8 * steps,)))
    return model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(data, 8)


def verified(loop, model, *others, **options):
    """Verify a loop with a model and an optimizer, and return the loop's result and the verification's."""
    run = nano(verify=True, verbose=False, **options)(loop)
    value = run(model, torch.optim.SGD(model.parameters(), lr=0.1), *others)
    return value, run.report["verify"]


OTHERS = (16, 64, "bf16-true")


@pytest.mark.parametrize("precision", ["bf16", 32, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
@pytest.mark.parametrize("kind", [Attending, Convolutional])
def test_a_sound_run_is_not_accused_and_computes_the_same(precision, kind):
    trained, states = [], []
    for verify in (False, True):
        train = nano(precision=precision, channels_last=kind is Convolutional, verify=verify, verbose=False)(fit)
        model, *others = parts(kind)
        losses = train(model, *others)
        if precision != "bf16-true":  # bf16-true rounds at random
            trained.append((losses, [each.clone() for each in model.state_dict().values()]))
        states.append(torch.get_rng_state())
    if trained:
        (losses, weights), (other_losses, other_weights) = trained
        assert losses == other_losses
        assert all(map(torch.equal, weights, other_weights))
    assert torch.equal(*states)
    result = train.report["verify"]
    assert result.status == "measured"
    assert result.detail.startswith(f"{kind.__name__}: errors up to ")
    assert result.data[kind.__name__].ok
    assert json.loads(json.dumps(train.report.as_dict()))
    names = [row.name for row in result.data[kind.__name__].gradients]
    assert set(names) == {name for name, _ in model.named_parameters()}


@pytest.mark.skipif(blocked_attention.KERNEL.unavailable is not None, reason=str(blocked_attention.KERNEL.unavailable))
def test_a_fault_is_named_once_by_a_warning(monkeypatch):
    monkeypatch.setattr(attention, "MIN_SCORES", 1)
    original = blocked_attention.blocked_attention
    monkeypatch.setattr(blocked_attention, "blocked_attention", lambda *args: original(*args) * 1.1)
    train = nano(precision="bf16", verify=True, verbose=False)(fit)
    with pytest.warns(NanoWarning, match=r"the output of layer.self_attn of Attending is off.*See the table") as warned:
        train(*parts())
    assert len([each for each in warned if "is off" in str(each.message)]) == 1
    assert train.report["verify"].detail == "Attending: the output of layer.self_attn is off by more than rounding"
    assert "<- not rounding" in str(train.report["verify"].data)


def test_the_gradients_that_reach_the_outputs_are_those_of_the_loop():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return {"used": self.used(x), "unused": self.unused(x)}

    def train(model, optimizer):
        model(torch.ones(2, 4))["used"].sum().backward()
        optimizer.step()

    _, result = verified(train, Two())
    assert {row.name for row in result.data["Two"].gradients} == {"used.weight", "used.bias"}


def test_calls_of_submodules_and_methods_are_compared_together():
    class Encoding(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(4, 8), nn.Linear(8, 4)

        def decode(self, z):
            return self.decoder(z.tanh())

    def train(model, optimizer, loader):
        for (x,) in loader:
            z = model.encoder(x)
            loss = F.mse_loss(model.decode(z=z), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model = Encoding()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), 4)
    _, result = verified(train, model, loader, precision="bf16")
    found = result.data["Encoding"]
    assert found.ok, str(found)
    assert {row.name for row in found.gradients} == {name for name, _ in model.named_parameters()}
    assert {row.name for row in found.outputs} == {"encoder", "decoder"}


def test_two_models_are_each_compared_at_their_first_step_and_frozen_ones_are_left_out():
    class Adversarial(TorchNano):
        def train(self, generator, discriminator, teacher):
            of_g, of_d = (torch.optim.Adam(each.parameters()) for each in (generator, discriminator))
            self.setup([generator, discriminator], [of_g, of_d])
            self.setup(teacher)
            for _ in range(2):
                fake = generator(torch.randn(8, 4))
                of_d.zero_grad()
                (discriminator(torch.randn(8, 6)) - discriminator(fake.detach())).mean().backward()
                of_d.step()
                of_g.zero_grad()
                (discriminator(fake) - teacher(fake)).mean().backward()
                of_g.step()

    torch.manual_seed(0)
    adversarial = Adversarial(verify=True, verbose=False)
    models = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(6, 1).requires_grad_(False)
    adversarial.train(*models)
    assert set(adversarial.report["verify"].data) == {"Linear", "Linear 2"}
    assert all(found.ok for found in adversarial.report["verify"].data.values())


def test_a_model_that_cannot_be_copied_is_said_and_trained():
    model, optimizer, loader = parts()
    with open(__file__) as model.held:
        train = nano(verify=True, verbose=False)(fit)
        with pytest.warns(NanoWarning, match="a copy of Attending raised.*cannot be copied"):
            losses = train(model, optimizer, loader)
    assert len(losses) == 2
    assert train.report["verify"].status == "skipped"


def test_a_loop_without_a_step_says_so():
    @nano(verify=True, verbose=False)
    def evaluate(model, loader):
        with torch.no_grad():
            return [model(x).sum().item() for x, _ in loader]

    model, _, loader = parts()
    evaluate(model, loader)
    detail = "no step of an optimizer has followed a backward from an output of a model"
    assert evaluate.report["verify"].detail == detail


def test_nothing_of_the_model_is_changed_or_kept():
    model, _, loader = parts(Convolutional, steps=1)
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    before = copy.deepcopy(model.state_dict())

    def step_of_nothing(model, optimizer):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()

    assert verified(step_of_nothing, model, precision="bf16")[1].data["Convolutional"].ok
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}  # by the loop's only call
    assert model[1].num_batches_tracked == 1
    assert len(seen) > 1  # hooks of modules run on the copies too
    gc.collect()
    kept = [each for each in gc.get_objects() if isinstance(each, Convolutional)]
    assert kept == [model]


@pytest.mark.slow
def test_rank_0_compares_and_logs_for_two_processes():
    train = nano(num_processes=2, precision="bf16", verify=True, log_casts=True, verbose=False)(fit)
    losses = train(*parts(steps=8))
    plain = nano(num_processes=2, precision="bf16", verbose=False)(fit)
    assert losses == plain(*parts(steps=8))
    assert train.report["verify"].data["Attending"].ok
    assert train.report["log_casts"].status == "measured"


class Mixing(nn.Module):
    """Has calls with arguments of all kinds."""

    def __init__(self):
        super().__init__()
        self.last, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def with_other(self, other, x):
        return self.last(other(x))

    def with_memory(self, x, memory):
        memory.append(self.last(x).detach())
        return self.last(memory[-1]), self.scale

    def forward(self, x):
        return self.last(x)


def steps_of(call, verify, step=lambda optimizer: optimizer.step(), **options):
    """Return the weights after two steps, the report, and the list's length."""
    torch.manual_seed(0)
    model, other, memory = Mixing(), nn.Linear(4, 4), []

    def train(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            call(model, other, memory).square().sum().backward()
            step(optimizer)

    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    run = nano(verify=verify, verbose=False, **options)(train)
    run(model, optimizer)
    return [each.detach().clone() for each in (*model.parameters(), *other.parameters())], run.report, len(memory)


X = torch.arange(8.0).view(2, 4) / 8
# Each call, the list's length after two steps, and the result of the verification.
CALLS = {
    "a list that the model fills": (lambda model, other, memory: model.with_memory(X, memory)[0], 2, None),
    "a parameter that the model returns": (lambda model, other, memory: sum(model.with_memory(X, memory)), 2, None),
    "another module": (
        lambda model, other, memory: model.with_other(other, X),
        0,
        "a copy of Mixing raised",
    ),
    "a transform": (lambda model, other, memory: torch.func.vmap(model)(X), 0, ""),
}


@pytest.mark.parametrize(("call", "length", "told"), CALLS.values(), ids=CALLS)
def test_call_computes_the_same_whether_or_not_it_can_be_compared(call, length, told):
    plain, _, _ = steps_of(call, verify=False)
    with pytest.warns(NanoWarning, match=told) if told else contextlib.nullcontext():
        found, report, filled = steps_of(call, verify=True)
    assert all(map(torch.equal, found, plain))
    assert filled == length
    assert report["verify"].data["Mixing"].ok if told is None else report["verify"].status == "skipped"


@torch.no_grad()
def step_without_gradients(optimizer):
    optimizer.step()


@pytest.mark.parametrize(
    ("scale", "options"),
    [(1, {"step": step_without_gradients}), (4096, {"precision": 16})],
    ids=["without gradients enabled", "scaled by the user"],
)
def test_step_is_compared_without_an_accusation(scale, options):
    _, report, _ = steps_of(lambda model, other, memory: model(X) * scale, True, **options)
    assert report["verify"].data["Mixing"].ok, str(report["verify"].data)


def test_a_single_step_with_a_closure_is_compared_at_the_end():
    def train(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(X).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    assert verified(train, Mixing())[1].data["Mixing"].ok


def with_forward_of_the_original(model):
    forward = model[0].forward
    model[0].forward = lambda x: forward(x) * 1.1


def with_own_to(model):
    to, double = model.to, model.double
    model.to = lambda *args, **kwargs: to(*args, **kwargs)
    model.double = lambda: double()


def with_hooks_of_the_original(model):
    model.register_buffer("calls", torch.zeros(1))
    model[0].register_forward_hook(lambda *_: model.calls.add_(1) and None)
    model[1].register_forward_hook(lambda *_: model[0].bias.data.add_(1) and None)


@pytest.mark.parametrize("change", [with_forward_of_the_original, with_own_to, with_hooks_of_the_original])
@pytest.mark.parametrize("precision", ["bf16", "bf16-true", 64])
def test_closures_over_the_user_s_model_leave_it_as_it_is(change, precision):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    change(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(dict(model.state_dict()))
    with contextlib.suppress(RuntimeError):  # raised if the closure uses the original's fp32 weights
        nano_loop.verify(model, lambda model, x: model(x).square().mean(), torch.randn(8, 4), precision=precision)
    for parameter in model.parameters():
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
