"""precision="64" and "bf16-true": the loop's view, the optimizers' results, and the state afterwards."""

import dataclasses
import sys

import pytest
import torch
from distributed import small
from loops.pairs import has_ipex
from torch import nn

from nano_loop import NanoConfigError, all_gather, nano

QUIET = {"verbose": False}
in_bf16 = nano(precision="bf16-true", **QUIET)
X = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))


def train(model, optimizer, steps=40, seen=None):
    losses = []
    for step in range(steps):
        rows = slice(step * 16 % 64, step * 16 % 64 + 16)
        optimizer.zero_grad()
        output = model(X[rows])
        loss = nn.functional.mse_loss(output, Y[rows])
        loss.backward()
        if seen is not None:
            seen.append((output.dtype, {each.dtype for each in model.parameters()}, model[0].weight.grad.dtype))
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-8:]) / 8


@pytest.mark.parametrize(("precision", "dtype"), [(64, torch.float64), ("bf16-true", torch.bfloat16)])
def test_parameters_have_the_dtype_in_the_run_and_outputs_are_fp32(precision, dtype):
    model, seen = network(), []
    before = [*model.parameters(), *model.buffers()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    nano(precision=precision, **QUIET)(train)(model, optimizer, 2, seen)
    assert seen == [(torch.float32, {dtype}, dtype)] * 2
    after = [*model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert {each.dtype for each in after if each.is_floating_point()} == {torch.float32}
    assert {each.grad.dtype for each in model.parameters()} == {torch.float32}
    state = [each for values in optimizer.state.values() for each in values.values()]
    assert {each.dtype for each in state} == {torch.float32}
    train(model, optimizer, 2)  # plain, with the objects left by the run


def a_new_layer(model, optimizer):
    torch.manual_seed(1)
    model.insert(3, nn.Linear(32, 32))
    optimizer.add_param_group({"params": [*model[3].parameters()]})


def a_new_weight(model, optimizer):
    model[0].weight = nn.Parameter(0.5 * model[0].weight.detach().float())
    optimizer.param_groups[0]["params"][0] = model[0].weight


def swapped_weights(model, optimizer):
    for weight in (model[0].weight, model[1].bias):
        torch.utils.swap_tensors(weight, nn.Parameter(0.5 * weight.detach().float()))


@pytest.mark.parametrize("change", [a_new_layer, a_new_weight, swapped_weights])
@pytest.mark.parametrize(("precision", "tolerance"), [(64, 1e-4), ("bf16-true", 0.1)])
def test_what_the_loop_puts_into_a_model_has_the_dtype_too(precision, tolerance, change):
    def loop(model, optimizer):
        train(model, optimizer, 3)
        change(model, optimizer)
        train(model, optimizer, 3)

    models = []
    for function in (loop, nano(precision=precision, **QUIET)(loop)):
        model = network()
        function(model, torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-2))
        models.append([each.detach() for each in model.parameters()])
    for plain, ours in zip(*models, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=tolerance * float(plain.abs().max()))


@pytest.mark.parametrize("kind", [torch.optim.SGD, pytest.param(torch.optim.AdamW, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_there_before", [True, False])
def test_small_updates_of_optimizers_that_nobody_has_set_up_are_not_lost(kind, is_there_before):
    def steps(model, hidden):
        optimizer = hidden() if is_there_before else kind(model.parameters(), 1e-4)
        for _ in range(400):
            optimizer.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()

    model = nn.Linear(64, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = kind(model.parameters(), 1e-4)
    nano(precision="bf16-true", verbose=False)(steps)(model, lambda: optimizer)
    assert model.weight.dtype is torch.float32
    assert model.weight.mean().item() == pytest.approx(0.96, abs=0.005)


@pytest.mark.parametrize("precision", [64, "bf16-true"])
def test_state_of_an_optimizer_that_the_loop_creates_is_fp32_after_the_run(precision):
    def loop(model):
        model.load_state_dict(model.state_dict(), assign=True)
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, steps=2)
        return optimizer

    model = network()
    optimizer = nano(precision=precision, verbose=False)(loop)(model)
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    train(model, optimizer, steps=1)


@pytest.mark.parametrize(("precision", "dtype"), [(64, torch.float64), (64, None), ("bf16-true", None)])
def test_run_in_a_run_leaves_the_state_in_the_dtype_of_the_weights(precision, dtype):
    @nano(precision=precision, verbose=False)
    def loop(model, optimizer, depth):
        train(model, optimizer, steps=1)
        if depth:
            loop(model, optimizer, depth - 1)
        train(model, optimizer, steps=1)

    model = network().to(dtype)
    optimizer = torch.optim.Adam(model.parameters())
    loop(model, optimizer, 2)
    expected = {torch.float32, dtype or torch.float32}  # of counters, and of moments
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == expected


def test_closures_run_in_bf16():
    model, seen = network(), []

    @in_bf16
    def step(model, optimizer):
        def closure():
            seen.append(model[0].weight.dtype)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(X), Y)
            loss.backward()
            return loss.detach()

        before = closure().item()
        optimizer.step(closure)
        return before, closure().item()

    before, after = step(model, torch.optim.LBFGS(model.parameters(), 0.01, max_iter=3))
    assert after < before
    assert set(seen) == {torch.bfloat16}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "options",
    [
        {"precision": 64},
        {"precision": "bf16-true"},
        {"precision": 32, "optimizer_state": "bf16"},
        {"precision": "bf16-true", "optimizer_state": "bf16"},
        *([{"use_ipex": True}, {"use_ipex": True, "precision": "bf16"}] if has_ipex() else []),
    ],
    ids=str,
)
def test_ranks_stay_the_same(options):
    def loop(model, optimizer):
        for step in range(6):
            rows = slice(small.rank() * 8 + step % 2 * 16, small.rank() * 8 + step % 2 * 16 + 8)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(X[rows]), Y[rows]).backward()
            optimizer.step()
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        return all_gather(torch.cat([each.detach().double().flatten() for each in (*model.parameters(), *moments)]))

    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    found = nano(**small.OPTIONS, **options)(loop)(model, torch.optim.AdamW(model.parameters(), 0.01))
    assert torch.equal(found[0], found[1])
    assert found.dtype is not torch.float32
    assert {each.dtype for each in model.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.parametrize(
    ("precision", "cast"),
    [
        *(pytest.param(each, False, marks=pytest.mark.slow) for each in (32, "bf16", 64)),
        *(("bf16-true", False), ("bf16", True), ("bf16-true", True)),
    ],
)
def test_scripted_models_train_in_each_precision(precision, cast):
    if "intel_extension_for_pytorch" in sys.modules:
        pytest.skip("an earlier test has imported IPEX, whose passes make TorchScript's backward fail, by hand too")
    torch.manual_seed(0)
    model = torch.jit.script(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    if cast:  # as in some tutorials
        model = model.to(torch.bfloat16)
    before = {each.dtype for each in model.parameters()}
    loss = nano(precision=precision, **QUIET)(train)(model, torch.optim.AdamW(model.parameters(), 0.01), 200)
    assert loss < 0.1
    assert {each.dtype for each in model.parameters()} == before


class Tied(nn.Module):
    """Its two weights share memory, and a buffer is a view of one of them."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 4), nn.Linear(4, 16)
        self.decoder.weight = nn.Parameter(self.encoder.weight.t())
        self.register_buffer("last_row", self.encoder.weight.detach()[-1])

    def forward(self, x):
        return self.decoder(self.encoder(x))


@pytest.mark.parametrize("precision", [64, "bf16-true"])
def test_parameters_that_share_memory_share_it_in_the_run_and_after_it(precision):
    def apart(model):
        weight, other = model.encoder.weight, model.decoder.weight
        return not (torch.equal(weight, other.t()) and torch.equal(weight[-1], model.last_row))

    @nano(precision=precision, verbose=False)
    def train(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            assert not apart(model)

    model = Tied()
    before = model.encoder.weight.detach().clone()
    train(model, torch.optim.Adam(model.parameters(), lr=0.05))
    assert not apart(model)
    assert not torch.allclose(model.encoder.weight, before)


def flat_weights(model):
    """Put all parameters into one tensor, as programs do to send or perturb them together."""
    flat, begin = nn.utils.parameters_to_vector(model.parameters()).detach(), 0
    for each in model.parameters():
        each.data = flat[begin : begin + each.numel()].view(each.shape)
        begin += each.numel()
    return flat


@pytest.mark.parametrize("precision", [64, "bf16-true"])
@pytest.mark.parametrize(
    "alias_of",
    [
        lambda model: model[0].weight.data.flatten(),
        lambda model: model[1].running_mean.view(-1),
        lambda model: torch.from_numpy(model[3].weight.detach().numpy()).flatten(),
        lambda model: model.state_dict()["3.bias"],
        flat_weights,
    ],
    ids=["data", "buffer", "numpy", "state_dict", "flat weights"],
)
def test_what_shares_the_memory_of_a_weight_has_its_numbers_after_the_run(precision, alias_of):
    model = network()
    alias = alias_of(model)
    before, optimizer = alias.clone(), torch.optim.SGD(model.parameters(), 0.1)
    nano(precision=precision, **QUIET)(train)(model, optimizer, 2)
    (tensor,) = (each for each in [*model.parameters(), *model.buffers()] if each.data_ptr() == alias.data_ptr())
    assert torch.equal(tensor.flatten(), alias[: tensor.numel()])
    assert not torch.equal(alias, before)


@pytest.mark.parametrize("precision", [32, "bf16", 64, "bf16-true"])
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_model_trains_after_a_run_that_evaluates_it(precision, grad):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def train():
        optimizer.zero_grad()
        model.train()(torch.randn(8, 4)).sum().backward()
        optimizer.step()

    @grad()
    @nano(precision=precision, verbose=False)
    def evaluate(model):
        return model.eval()(torch.randn(8, 4)).mean().item()

    train()
    evaluate(model)
    train()
    assert all(parameter.grad is not None for parameter in model.parameters())


@dataclasses.dataclass
class Record:
    scale: torch.Tensor
    last: torch.Tensor | None = None


class Writing(nn.Module):
    """Writes to its caller's inputs, and returns its own tensors."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Conv2d(2, 2, 3), []

    def forward(self, x, state, history, record):
        record.last = state["hidden"] = self.layer(x * state["scale"])
        history.append(record.last)
        self.kept.append(record.last)
        return record.last

    def lent(self):
        return self.kept


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"channels_last": True}, {"precision": 64}, {"precision": "bf16-true"}]
)
def test_containers_are_shared_by_the_model_and_the_loop(options):
    @nano(verbose=False, **options)
    def train(model):
        scale = torch.ones(1)
        state, history, record = {"scale": scale}, [torch.ones(1)], Record(scale)
        model(torch.randn(1, 2, 4, 4), state, history, record)
        assert state["scale"] is record.scale is scale
        lent = model.lent()
        assert lent is model.kept
        assert lent[0].dtype is torch.float32
        lent.clear()
        return sorted(state), len(history), record.last is not None, len(model.kept)

    assert train(Writing()) == (["hidden", "scale"], 2, True, 0)


@pytest.mark.parametrize("precision", [64, "bf16-true"])
def test_optimizer_of_a_flat_tensor_that_weights_are_views_of_is_an_error_whose_advice_works(precision):
    model = network()
    flat = nn.Parameter(nn.utils.parameters_to_vector(model.parameters()).detach())
    nn.utils.vector_to_parameters(flat.data, model.parameters())
    accelerated = nano(precision=precision, **QUIET)(train)
    with pytest.raises(NanoConfigError, match=r"SGD steps a tensor that weights are views of.*model\.parameters\(\)"):
        accelerated(model, torch.optim.SGD([flat], 0.01))
    before = flat.detach().clone()
    accelerated(model, torch.optim.SGD(model.parameters(), 0.01))
    assert not torch.equal(flat, before)  # the weights are views of it again
