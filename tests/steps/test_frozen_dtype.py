"""Frozen weights that are stored in bf16 only appear as fp32 to all uses in a program."""

import contextlib
import copy
import io
import pickle
import sys

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from kernels.heads import WORDS, batch, model_of, small_heads
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop import NanoConfigError, accelerated, global_rank, nano
from nano_loop.config.declarations import EXACT
from nano_loop.kernels import narrow_weight
from nano_loop.kernels.head import head
from nano_loop.kernels.head.logits import LazyLogits
from nano_loop.kernels.linear import product
from nano_loop.kernels.narrow_weight import NarrowWeight
from nano_loop.patching.operators import gives_kernels
from nano_loop.precision.autocast import frozen_weights

BF16 = EXACT | {"frozen_dtype": "bf16", "verbose": False}
X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Frozen weights of each kind, with a trained layer before and after them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Linear(128, 5)
        self.convolution = nn.Conv2d(4, 64, 9, padding=4)
        self.norm = nn.BatchNorm2d(64)
        self.down, self.linear = nn.Linear(64 * 64, 128), nn.Linear(128, 128)
        self.factor = nn.Parameter(torch.rand(128, 128) / 12)
        self.table = nn.Embedding(256, 128)
        self.attention = nn.MultiheadAttention(128, 4)
        self.lstm = nn.LSTM(128, 128)
        self.requires_grad_(False)
        self.first.requires_grad_(True)
        self.last.requires_grad_(True)
        self.recomputes = False

    def forward(self, x):
        x = self.first(x)
        return self.last(checkpoint(self.frozen, x, use_reentrant=False) if self.recomputes else self.frozen(x))

    def frozen(self, x):
        x = self.down(self.norm(self.convolution(x)).flatten(1))
        x = torch.addmm(self.linear.bias, F.gelu(x), self.factor) + self.table(torch.tensor([3, 200]))
        x = F.linear(x @ self.factor.t(), self.table.weight) @ self.table.weight
        x = self.attention(*[self.linear(x).unsqueeze(0)] * 3)[0]
        return self.lstm(x)[0].squeeze(0)


LARGE = ("convolution.weight", "down.weight", "linear.weight", "factor", "table.weight", "attention.in_proj_weight")


def rounded(model):
    """Round a model's frozen weights to bf16 values, except for an LSTM's, which the layer references; return it."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter.dim() > 1 and "lstm" not in name:
            parameter.data = parameter.data.bfloat16().float()
    return model


def trained(model, steps=3, autocast=False):
    torch.manual_seed(3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(X)
        loss = out.float().square().mean()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), model.first.weight.grad.clone()]
    return [*seen, *(value.clone() for value in model.state_dict().values())]


def narrow_names(model):
    """Return the names of the weights that are stored in bf16 only."""
    weights = model.named_parameters()
    return {name for name, weight in weights if isinstance(weight, NarrowWeight) and weight.numbers.wide is None}


@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_training_has_the_bits_of_rounded_weights(precision, recomputes):
    models = rounded(Net()), Net()
    for model in models:
        model.recomputes = recomputes
    expected = trained(models[0], autocast=precision == "bf16")
    with accelerated(models[1], **BF16 | {"precision": precision}):
        assert narrow_names(models[1]).issuperset(LARGE)
        actual = trained(models[1])
        assert narrow_names(models[1]).issuperset(LARGE)
    assert all(map(torch.equal, actual, expected))


def test_weights_are_plain_parameters_in_fp32_after_the_run():
    model = Net()
    model.factor.tag = "kept"
    before = [*model.parameters()]
    with accelerated(model, **BF16):
        assert isinstance(model.factor, nn.Parameter)
        assert model.factor.tag == "kept"
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    after = [*model.parameters()]
    assert all(old is new and type(new) is nn.Parameter for old, new in zip(before, after, strict=True))
    assert model.factor.tag == "kept"
    assert not hasattr(model.factor, "numbers")
    assert all(map(torch.equal, after, rounded(Net()).parameters()))


def saved(model):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)["factor"]


READERS = {
    "sum": lambda model: model.factor.sum(),
    "state_dict": lambda model: model.state_dict()["factor"],
    "clone": lambda model: model.factor.data.clone(),
    "save": saved,
    "deepcopy": lambda model: copy.deepcopy(model).factor,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)).factor,
    "pickled parameter": lambda model: pickle.loads(pickle.dumps(model.factor)),
    "numpy": lambda model: torch.from_numpy(model.factor.numpy().copy()),
    "numpy of a view": lambda model: torch.from_numpy(model.factor.data[3:].t().numpy().copy()),
    "tolist": lambda model: torch.tensor(model.factor[:3].tolist()),
    "storage": lambda model: torch.tensor(model.factor.untyped_storage().tolist()),
    "bits": lambda model: model.factor.view(torch.int32),
    "view": lambda model: model.factor.view(64, 256)[3:, ::2],
    "transposed": lambda model: model.factor.t() @ torch.ones(128, 2),
    "chunks": lambda model: torch.stack(model.factor.chunk(4)),
    "stacked": lambda model: torch.stack([model.factor, model.linear.weight]),
    "indexed": lambda model: model.factor[torch.tensor([1, 5])],
    "embedded": lambda model: F.embedding(torch.tensor([1, 5]), model.table.weight),
    "in double": lambda model: model.factor.double(),
    "in bf16": lambda model: model.factor.bfloat16(),
    "product of two": lambda model: model.factor @ model.linear.weight,
    "norm": lambda model: torch.stack([weight.norm() for weight in model.parameters()]),
    "foreach": lambda model: torch.stack(torch._foreach_norm([model.factor, model.linear.weight])),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "copied from": lambda model: torch.zeros(128, 128).copy_(model.factor),
    "in inference mode": lambda model: torch.inference_mode()(lambda: model.factor.data.mul(2))(),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("reader", READERS)
def test_who_reads_a_weight_gets_its_rounded_numbers_and_it_stays_narrow(reader):
    model = Net()
    expected = READERS[reader](rounded(Net()))
    with accelerated(model, **BF16):
        narrow = narrow_names(model)
        actual = READERS[reader](model)
        assert actual.dtype is expected.dtype
        assert torch.equal(actual, expected)
        if isinstance(expected, nn.Parameter):
            assert type(actual) is nn.Parameter
        del actual
        model(X)
        assert narrow_names(model) == narrow
    assert repr(model.factor) == repr(rounded(Net()).factor)


def test_graph_that_holds_a_weight_is_right_though_it_is_written_to_and_the_run_ends():
    models, losses = (rounded(Net()), Net()), []
    for model, run in zip(models, (contextlib.nullcontext(), accelerated(models[1], **BF16)), strict=True):
        with run:
            losses.append(model(X).square().sum())
            model.linear.weight.requires_grad_(True)
            held = model.factor.data
        losses[-1].backward()
        held.add_(1)
    assert torch.equal(models[0].first.weight.grad, models[1].first.weight.grad)
    assert all(map(torch.equal, models[0].state_dict().values(), models[1].state_dict().values()))


@pytest.mark.parametrize("made", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), copy.copy])
def test_copies_of_many_weights_have_each_its_own_numbers(made):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(20)), nn.Linear(128, 2))
    model[:-1].requires_grad_(False)
    model[1].weight = model[0].weight
    expected = [parameter.clone() for parameter in rounded(copy.deepcopy(model)).parameters()]
    with accelerated(model, **BF16):
        twin = made(model)
        assert twin[1].weight is twin[0].weight
        assert all(map(torch.equal, twin.parameters(), expected))


@pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")
@pytest.mark.parametrize("precision", ["32", "auto"])
def test_weights_can_be_merged_by_data_beside_a_head(precision, monkeypatch):
    monkeypatch.setattr(frozen_weights, "FEWEST", 4096)
    with small_heads():
        model = model_of()
        model.head.requires_grad_(False)
        expected = model.head.weight.data + 1
        with accelerated(model, precision=precision, frozen_dtype="bf16", verbose=False):
            model.head.weight.data += 1
        torch.testing.assert_close(model.head.weight.data, expected, rtol=0, atol=2**-8)


def by_a_parametrization(module, value):
    class Given(nn.Module):
        def forward(self, weight):
            return value

    nn.utils.parametrize.register_parametrization(module, "weight", Given(), unsafe=True)
    nn.utils.parametrize.remove_parametrizations(module, "weight")


REPLACED = {
    "set_": lambda module, value: module.weight.set_(value),
    "set_ to a storage": lambda module, value: module.weight.set_(value.untyped_storage(), 0, (128, 128), (128, 1)),
    "data": lambda module, value: setattr(module.weight, "data", value),
    "a parametrization": by_a_parametrization,
}


@pytest.mark.parametrize("replace", REPLACED)
def test_weight_whose_memory_is_replaced_has_its_values(replace):
    model, value = Net(), torch.rand(128, 128)
    x = torch.rand(2, 128)
    with accelerated(model, **BF16):
        with torch.no_grad():
            REPLACED[replace](model.linear, value)
        assert torch.equal(model.linear.weight, value)
        torch.testing.assert_close(model.linear(x), F.linear(x, value, model.linear.bias))
    assert torch.equal(model.linear.weight, value)


def test_weight_whose_memory_others_have_stays():
    model = Net()
    array = model.factor.numpy()
    report = nano(**BF16)(lambda model: narrow_names(model))
    assert "factor" not in report(model)
    assert "3 others unchanged" in report.report["frozen_dtype"].detail
    assert array.shape == (128, 128)


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"exact": True}, Net()),
        ({"precision": 64}, Net()),
        ({"precision": "bf16-true"}, Net()),
        ({"compile": True}, Net()),
        ({}, Net().requires_grad_(True)),
        ({}, nn.Linear(8, 8).requires_grad_(False)),
    ],
)
def test_option_that_cannot_act_is_an_error(options, model):
    with pytest.raises(NanoConfigError, match="frozen_dtype"):
        nano(frozen_dtype="bf16", verbose=False, **options)(lambda model: None)(model)
    assert {type(weight) for weight in model.parameters()} == {nn.Parameter}


def trained_by_rank(model, optimizer):
    x = torch.rand(8, 256, generator=torch.Generator().manual_seed(0))[global_rank() :: 2]
    model(x).square().mean().backward()
    optimizer.step()
    return narrow_names(model)


@pytest.mark.slow
def test_ranks_keep_weights_in_bf16():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256).requires_grad_(False), nn.Linear(256, 2))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    train = nano(num_processes=2, auto_lr=False, frozen_dtype="bf16", verbose=False)(trained_by_rank)
    assert train(model, optimizer) == {"1.weight"}
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


@pytest.mark.skipif(product.KERNEL.unavailable is not None, reason=str(product.KERNEL.unavailable))
@pytest.mark.parametrize("bias", [False, True])
def test_products_that_round_read_the_bf16_numbers(bias, monkeypatch):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 2048, bias=bias).requires_grad_(False), nn.Linear(2048, 8))
    models, x, seen = (rounded(plain), copy.deepcopy(plain)), torch.rand(256, 64), []
    for model, options in zip(models, ({}, {"frozen_dtype": "bf16"}), strict=True):
        with accelerated(model, precision="auto", tune_operators=False, verbose=False, **options):
            if options:
                monkeypatch.setattr(NarrowWeight, "read", lambda weight: pytest.fail("in fp32"))
            out = model(x)
            out.square().mean().backward()
        seen.append([out.detach(), *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)])
    assert all(map(torch.equal, *seen))
    assert models[1][1].weight.grad is None


@pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9")
@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
def test_head_computes_its_loss_without_logits_by_parts_of_its_weight(precision, tied, monkeypatch):
    monkeypatch.setattr(narrow_weight, "_MOST", 4096)
    monkeypatch.setattr(frozen_weights, "FEWEST", 4096)

    def step(model):
        words, targets = batch()
        with torch.autocast("cpu", torch.bfloat16, enabled=model is models[0] and precision == "bf16"):
            logits = model(words)
        loss = F.cross_entropy(logits.float().view(-1, WORDS), targets.view(-1))
        loss.backward()
        return logits, loss

    models = [model_of(tied=tied, bias=False) for _ in range(2)]
    for model in models:
        model.head.requires_grad_(False)
        model.embedding.requires_grad_(False)
    rounded(models[0])
    _, expected = step(models[0])
    with small_heads(), accelerated(models[1], precision=precision, frozen_dtype="bf16", verbose=False):
        logits, loss = step(models[1])
        assert isinstance(logits, LazyLogits)
        torch.optim.SGD([*models[1].inner.parameters()], 0.1).step()
        assert not head.noted().whole
        assert logits.head.memory.tensor is None
        assert {"head.weight", "embedding.weight"} & narrow_names(models[1])
    torch.testing.assert_close(loss, expected, rtol=1e-3 if precision == "bf16" else 1e-6, atol=0)
