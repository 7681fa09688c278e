"""precision=16: gradients are scaled in backward and nowhere else, and steps that overflow are skipped."""

import copy

import pytest
import torch
from distributed import small
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nano_loop import NanoWarning, TorchNano, all_gather, nano
from nano_loop.cpu import Machine
from nano_loop.precision.autocast import loss_scale

QUIET = {"precision": 16, "verbose": False, "fused_optimizer": False}
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)
FP16 = torch.autocast("cpu", torch.float16)


@pytest.fixture
def small_scale(monkeypatch):
    """Begin with a scale by which nothing here overflows."""
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**8)


def batch(step):
    rows = slice(step * 16 % 64, step * 16 % 64 + 16)
    return X[rows], Y[rows]


def mlp():
    return nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.last = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.rnn(x[..., None])[0][:, -1])


class Checkpointed(nn.Module):
    """With a checkpoint whose segment uses a parameter that is no module's call."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.scale = nn.Parameter(torch.ones(32))
        self.reentrant = reentrant

    def forward(self, x):
        def segment(hidden):
            return F.gelu(self.middle(hidden)) * self.scale

        return self.last(checkpoint(segment, self.first(x), use_reentrant=self.reentrant))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.embedding((x[:, 0].abs() * 3).long().clamp(max=9)))


class Keeping(nn.Module):
    """Part of its loss reaches the loop by an attribute."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 1)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        self.penalty = hidden.float().square().mean()
        return self.last(hidden)


def plain(model, optimizer, loss, scaler):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)


def accelerated(model, optimizer, loss, scaler):
    loss.backward()


def train(model, optimizer, backward=accelerated, call=None, steps=8, penalty=0.0, clip=None, accumulate=1):
    """Train by hand with a `GradScaler`, or untouched; return the norms that the loop has seen."""
    scaler = torch.amp.GradScaler("cpu") if backward is plain else None
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            x, y = batch(step * accumulate + part)
            output = model(x) if call is None else call(model, x)
            loss = F.mse_loss(output, y) + getattr(model, "penalty", 0.0)
            loss = loss + penalty * sum(each.square().sum() for each in model.parameters())
            if part < accumulate - 1:
                (loss if scaler is None else scaler.scale(loss)).backward()
        backward(model, optimizer, loss, scaler)
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return norms


def by_hand(model, x):
    with FP16:
        return model(x).float()


def run(loop, model, *args, lr=0.1, **kwargs):
    """Run a loop with a model and its optimizer; return what the loop returns."""
    return nano(**QUIET)(loop)(model, torch.optim.SGD(model.parameters(), lr), *args, **kwargs)


def step(model, optimizer, factor=1.0, x=X, y=Y):
    """Take a step by a loss that is multiplied by a factor."""
    optimizer.zero_grad()
    (F.mse_loss(model(x), y) * factor).backward()
    optimizer.step()


def scale_of(optimizer):
    return optimizer.state_dict()["param_groups"][0]["loss_scale"]


LOOPS = {
    "plain": (mlp, {}),
    "clipping": (mlp, {"clip": 0.5}),
    "a penalty on the weights": (mlp, {"penalty": 0.01}),
    "accumulation": (mlp, {"accumulate": 2, "clip": 0.5}),
    "reentrant checkpoint": (lambda: Checkpointed(True), {}),
    "checkpoint": (lambda: Checkpointed(False), {}),
    "sparse gradients": (Embedded, {}),
    "a loss by an attribute": (Keeping, {}),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_is_that_with_a_grad_scaler_by_hand(loop):
    make, settings = LOOPS[loop]
    torch.manual_seed(0)
    expected = make()
    found, users = copy.deepcopy(expected), copy.deepcopy(expected)
    norms = [
        train(expected, torch.optim.SGD(expected.parameters(), 0.1), plain, by_hand, **settings),
        run(train, found, **settings),
        # The loop by hand, inside of the run: its scaler scales alone.
        run(train, users, plain, by_hand, **settings),
    ]
    assert str(norms[0]) == str(norms[1]) == str(norms[2])
    for model in (found, users):
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-7)
    assert not torch.equal(next(found.parameters()), next(make().parameters()))


def test_lstm_which_torch_cannot_train_in_fp16_is_fp32():
    torch.manual_seed(0)
    model = Recurrent()
    before = F.mse_loss(model(X), Y).item()
    fit = nano(**QUIET)(train)
    fit(model, torch.optim.Adam(model.parameters(), 0.03), steps=60)
    assert F.mse_loss(model(X), Y).item() < before / 2
    assert "LSTMs of Recurrent in fp32" in fit.report["precision"].detail


def test_small_gradients_are_not_lost():
    def loop(model, optimizer):
        (model(X).mean() * 1e-6).backward()  # 1e-8 an element, below fp16's smallest number
        return model[0].weight.grad.clone()

    torch.manual_seed(0)
    model = mlp()
    exact = loop(copy.deepcopy(model), None)
    found = run(loop, model)
    with FP16:
        lost = loop(copy.deepcopy(model), None)
    assert (lost - exact).norm() > 0.3 * exact.norm()
    torch.testing.assert_close(found, exact, rtol=0.05, atol=float(exact.abs().max()) / 100)


def test_overflow_at_the_third_step_skips_that_step_alone():
    steps = []

    def loop(model, optimizer):
        for number in range(6):
            before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
            step(model, optimizer, 1e6 if number == 2 else 1e-2, *batch(number))
            after = [model.state_dict(), optimizer.state_dict()["state"]]
            group = optimizer.state_dict()["param_groups"][0]
            steps.append((str(before) == str(after), group["loss_scale"], group["loss_scale_good"]))

    torch.manual_seed(0)
    model, fit = mlp(), nano(**QUIET)(loop)
    fit(model, torch.optim.Adam(model.parameters(), 0.01))
    first = loss_scale.FIRST
    assert steps == [
        *((False, first, 1), (False, first, 2), (True, first / 2, 0)),
        *((False, first / 2, 1), (False, first / 2, 2), (False, first / 2, 3)),
    ]
    assert fit.report["loss_scale"].detail == "1 step was skipped; the scale is 32,768 now"


def test_loop_that_looks_for_overflow_itself_is_not_skipped_twice():
    def loop(model, optimizer):
        taken = []
        for scale in (1e8, 1e-2, 1e-2):
            optimizer.zero_grad()
            (F.mse_loss(model(X), Y) * scale).backward()
            if all(each.grad.isfinite().all() for each in model.parameters()):
                before = copy.deepcopy(model.state_dict())
                optimizer.step()
                taken.append(str(before) != str(model.state_dict()))
        return taken

    assert run(loop, mlp()) == [True, True]


@pytest.mark.usefixtures("small_scale")
def test_scale_grows_after_many_good_steps_and_goes_on_in_the_next_call(monkeypatch):
    monkeypatch.setattr(loss_scale, "INTERVAL", 5)

    def loop(model, optimizer):
        train(model, optimizer, steps=4)
        return scale_of(optimizer)

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    start, fit = loss_scale.FIRST, nano(**QUIET)(loop)
    assert [fit(model, optimizer) for _ in range(3)] == [start, 2 * start, 4 * start]
    assert "loss_scale" not in optimizer.param_groups[0]


def test_scale_is_loaded_with_the_optimizer_into_a_run_and_out_of_one():
    def save(model, optimizer):
        state = optimizer.state_dict()
        state["param_groups"][0].update(loss_scale=512.0, loss_scale_good=7)
        return state

    def load(model, optimizer, state=None):
        if state is not None:
            optimizer.load_state_dict(state)
        group = optimizer.state_dict()["param_groups"][0]
        return group["loss_scale"], group["loss_scale_good"]

    model = mlp()
    state = nano(**QUIET)(save)(model, torch.optim.Adam(model.parameters()))
    fresh = torch.optim.Adam(model.parameters())
    assert nano(**QUIET)(load)(model, fresh, state) == (512.0, 7)
    fresh = torch.optim.Adam(model.parameters())
    fresh.load_state_dict(state)
    assert nano(**QUIET)(load)(model, fresh) == (512.0, 7)
    train(model, fresh)  # plain


@pytest.mark.usefixtures("small_scale")
def test_loop_sees_no_scale():
    """In hooks, in gradients of inputs, outputs and of what is in between, and in `autograd.grad`, twice."""

    def loop(model, optimizer):
        seen = {}

        def note(name):
            return lambda gradient: seen.__setitem__(name, gradient.clone())

        x = X.clone().requires_grad_()
        model[0].weight.register_hook(note("hook of a parameter"))
        hidden = model[0](x)
        hidden.register_hook(note("hook in between"))
        hidden.retain_grad()
        output = model[3](F.gelu(hidden))
        output.retain_grad()
        own = torch.ones(1, requires_grad=True)
        loss = F.mse_loss(output * own, Y)
        (gradient,) = torch.autograd.grad(loss, output, retain_graph=True)
        (of_x,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + 0.1 * of_x.norm()).backward()
        kept = {"input": x.grad, "own": own.grad, "hidden": hidden.grad, "output": output.grad}
        return {**seen, **kept, "grad": gradient, "of x": of_x.detach(), "weight": model[0].weight.grad}

    torch.manual_seed(0)
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))  # of before the run
    found = run(loop, model)
    model.zero_grad()
    for name, expected in loop(model, None).items():
        torch.testing.assert_close(found[name], expected, rtol=0.05, atol=float(expected.abs().max()) / 50, msg=name)


class Recomputing(torch.autograd.Function):
    """A checkpoint as some libraries have it: with `autograd.grad` in its backward."""

    @staticmethod
    def forward(ctx, layer, x, *parameters):
        ctx.layer, ctx.parameters = layer, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(x)
        return None, *torch.autograd.grad(output, [x, *ctx.parameters], gradient)


def by_custom_function(model):
    hidden = Recomputing.apply(model[0], X, *model[0].parameters())
    F.mse_loss(model[1:](hidden), Y).backward()
    return model[0].weight.grad


def of_a_leaf_among_the_roots(model):
    own = torch.ones((), requires_grad=True)
    torch.autograd.backward([model(X).mean(), own])
    return own.grad


def of_a_leaf_in_a_checkpoint(model):
    own = torch.full((32,), 0.5, requires_grad=True)
    hidden = checkpoint(lambda x: model[0](x) * own, X.clone().requires_grad_(), use_reentrant=True)
    model[1:](hidden).square().mean().backward()
    return own.grad


def of_a_backward_in_a_hook(model):
    own = torch.ones((), requires_grad=True)

    def hook(gradient):
        with torch.enable_grad():
            (own * 3).backward()

    hidden = model[0](X)
    hidden.register_hook(hook)
    model[1:](hidden).mean().backward()
    return own.grad


def kept_around_another_run(model):
    hidden = model[0](X)
    hidden.retain_grad()
    other = mlp()
    run(train, other, steps=1)
    model[1:](hidden).square().mean().backward()
    return hidden.grad


def written_to_by_a_hook(model):
    hidden = model[0](X)
    hidden.register_hook(lambda gradient: [gradient.mul_(0), None][1])
    model[1:](hidden).square().mean().backward()
    return model[0].weight.grad


def of_a_generator_of_parameters(model):
    return torch.autograd.grad(model(X).mean() * 1e-7, model.parameters())[0]


def of_values_of_a_dict(model):
    torch.autograd.backward({"loss": model(X).square().mean()}.values())
    return model[0].weight.grad


def frozen_before_the_backward(model):
    loss = model(X).square().mean()
    model[0].requires_grad_(False)
    loss.backward()
    return model[3].weight.grad


def that_overflows_at_first(model):
    x = X.clone().requires_grad_()
    return torch.autograd.grad(model(x).sum() * 10, x)[0]


def of_a_batch_of_directions(model):
    x = X[:2].clone().requires_grad_()
    output = model(x)
    return torch.autograd.grad(output, x, torch.eye(2)[:, :, None], is_grads_batched=True)[0]


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad|.*There is a performance drop")
@pytest.mark.parametrize(
    "gradient",
    [
        *(by_custom_function, of_a_leaf_among_the_roots, of_a_leaf_in_a_checkpoint, of_a_backward_in_a_hook),
        *(kept_around_another_run, written_to_by_a_hook, of_a_generator_of_parameters, of_values_of_a_dict),
        *(frozen_before_the_backward, that_overflows_at_first, of_a_batch_of_directions),
    ],
)
def test_gradient_is_that_of_the_plain_loop(gradient):
    torch.manual_seed(0)
    model = mlp()
    expected = gradient(copy.deepcopy(model))
    found = run(lambda model, optimizer: gradient(model), model)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=float(expected.abs().max()) / 50)
    assert all(each._backward_hooks is None for each in model.parameters())


def test_loop_that_leaves_bad_batches_out_trains_and_keeps_its_gradients():
    def loop(model, optimizer):
        taken = 0
        for step in range(20):
            optimizer.zero_grad()
            x, y = batch(step)
            (F.mse_loss(model(x), y) * 100).backward()
            if not nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                continue
            optimizer.step()
            assert model[0].weight.grad.isfinite().all()
            taken += 1
        (F.mse_loss(model(X), Y) * 1e12).backward()
        optimizer.step()
        assert model[0].weight.grad is not None
        return taken

    assert run(loop, mlp(), lr=0.01) > 10


def test_scale_has_a_floor_at_which_the_run_warns(monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST", 8.0)

    def loop(model, optimizer):
        for factor in (float("nan"), float("nan"), float("nan"), 1e-2):
            step(model, optimizer, factor)
        return scale_of(optimizer)

    with pytest.warns(NanoWarning, match="also without a loss scale.*Lower the learning rate"):
        assert run(loop, mlp()) == loss_scale.LEAST


def test_one_overflow_halves_once_whatever_the_number_of_optimizers():
    def loop(model, first, second):
        for scale in (1e8, 1e-2):
            for each in (first, second):
                each.zero_grad()
            (F.mse_loss(model(X), Y) * scale).backward()
            for each in (first, second):
                each.step()
        second.load_state_dict(torch.optim.SGD(model[3].parameters(), 0.1).state_dict())
        return [scale_of(first), scale_of(second)]

    model = mlp()
    optimizers = [torch.optim.SGD(model[place].parameters(), 0.1) for place in (0, 3)]
    assert nano(**QUIET)(loop)(model, *optimizers) == [loss_scale.FIRST / 2] * 2


def test_backwards_of_other_models_are_theirs(monkeypatch):
    other = mlp()
    reached = []
    original = loss_scale.divided
    monkeypatch.setattr(loss_scale, "divided", lambda *args: reached.append(args[1]) or original(*args))

    def loop(model, optimizer):
        other(X).sum().backward()
        assert not reached
        model(X).sum().backward()
        assert reached == [loss_scale.FIRST]

    run(loop, mlp())
    assert torch.autograd.grad.__module__ == "torch.autograd"


@pytest.mark.usefixtures("small_scale")
def test_generator_and_critic_share_the_scale():
    def loop(models, optimizers):
        (generator, critic), (of_generator, of_critic) = models, optimizers
        for step in range(4):
            x, _ = batch(step)
            fake = generator(x)
            of_critic.zero_grad()
            (critic(x[:, :1]).mean() - critic(fake.detach()).mean()).backward()
            of_critic.step()
            of_generator.zero_grad()
            critic(fake).mean().backward()
            of_generator.step()

    def made():
        torch.manual_seed(0)
        models = mlp(), nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
        return models, [torch.optim.SGD(each.parameters(), 0.1) for each in models]

    expected, found = made(), made()
    loop(*expected)
    nano(**QUIET)(loop)(*found)
    for mine, other in zip(found[0], expected[0], strict=True):
        for each, same in zip(mine.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(each, same, rtol=0.02, atol=2e-3)


def with_gradients_that_it_assigns(model, optimizer, factor):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(F.mse_loss(model(X), Y) * factor, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def with_a_closure(model, optimizer, factor):
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), Y) * factor
        loss.backward()
        return loss

    optimizer.step(closure)


def with_an_optimizer_of_its_own(model, _, factor):
    step(model, torch.optim.SGD(model.parameters(), 0.1), factor)


def with_optimizers_in_the_backward(model, _, factor):
    optimizers = {each: torch.optim.SGD([each], 0.1) for each in model.parameters()}
    for each, optimizer in optimizers.items():
        each.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    (F.mse_loss(model(X), Y) * factor).backward()


@pytest.mark.parametrize(
    "loop",
    [
        *(with_gradients_that_it_assigns, with_a_closure),
        *(with_an_optimizer_of_its_own, with_optimizers_in_the_backward),
    ],
)
def test_other_loops_skip_too(loop):
    for factor, is_skipped in ((1e8, True), (1e-2, False)):
        model = mlp()
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        run(loop, model, factor)
        after = nn.utils.parameters_to_vector(model.parameters()).detach()
        assert torch.equal(after, before) is is_skipped
        assert after.isfinite().all()


def test_ranks_skip_together_and_stay_the_same():
    def loop(model, optimizer):
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(step + small.rank())
            loss = F.mse_loss(model(x), y)
            (loss * (1e8 if (step, small.rank()) == (1, 1) else 1e-2)).backward()
            nn.utils.clip_grad_value_(model.parameters(), 1.0)  # which hides what is infinite
            optimizer.step()
            scales.append(scale_of(optimizer))
        return all_gather(torch.cat([nn.utils.parameters_to_vector(model.parameters()), torch.tensor(scales)]))

    torch.manual_seed(0)
    model = mlp()
    options = {**small.OPTIONS, **QUIET}
    found = nano(**options)(loop)(model, torch.optim.SGD(model.parameters(), 1e-3))
    assert torch.equal(found[0], found[1])
    assert found[0][-4:].tolist() == [2.0**16, 2.0**15, 2.0**15, 2.0**15]


@pytest.mark.filterwarnings("ignore:.*attribute of a Tensor that is not a leaf")
def test_compiled_models_train_as_others():
    torch.manual_seed(0)
    model = mlp()
    compiled = copy.deepcopy(model)
    losses = []
    by_the_user = torch.compile(copy.deepcopy(model), backend="eager")
    for each, options in ((model, {}), (compiled, {"compile": {"backend": "eager"}}), (by_the_user, {})):
        nano(**QUIET, **options)(train)(each, torch.optim.SGD(each.parameters(), 0.1))
        losses.append(F.mse_loss(each(X), Y).item())
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-3)
    torch.compiler.reset()


def clipped(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="errors have no notes before Python 3.11")
@pytest.mark.parametrize(
    ("precision", "anomaly", "look", "is_noted"),
    [(16, False, clipped, True), (16, True, len, True), ("bf16", False, clipped, False)],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled|.*Error detected in")
def test_error_about_gradients_that_are_not_finite_names_the_scale(precision, anomaly, look, is_noted):
    @nano(**{**QUIET, "precision": precision})
    def train(model):
        with torch.autograd.set_detect_anomaly(anomaly):
            F.mse_loss(model(X), Y * float("inf" if precision == "bf16" else 1e4)).backward()
            look(model)

    with pytest.raises(RuntimeError) as raised:
        train(mlp())
    assert ["loss scale" in note for note in getattr(raised.value, "__notes__", ())] == [True] * is_noted


def test_cpu_without_fp16_instructions_is_warned_of(monkeypatch):
    monkeypatch.setattr(Machine, "has_fast_fp16", False)
    monkeypatch.setattr(Machine, "has_fast_bf16", True)
    with pytest.warns(NanoWarning, match=r'no fp16 instructions.*a thousand times.*precision="bf16"'):
        run(train, mlp(), steps=1)


def test_autocast_of_the_instance_is_fp16():
    class Mine(TorchNano):
        def train(self, model, optimizer):
            model, optimizer = self.setup(model, optimizer)
            with self.autocast():
                product = X @ X.T
            self.backward(F.mse_loss(model(X), Y))
            return product.dtype, model[0].weight.grad.abs().max()

    model = mlp()
    dtype, largest = Mine(**QUIET).train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert dtype is torch.float16
    assert 0 < largest < 100
