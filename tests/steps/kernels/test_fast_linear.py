"""Runs in bf16 compute large products in blocks, forward and backward, for the calls of set-up models alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop import nano
from nano_loop.kernels.linear import linear, product
from nano_loop.patching.operators.operators import gives_kernels
from nano_loop.steps.kernels import fast_linear as module

pytestmark = [
    pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9"),
    pytest.mark.skipif(product.KERNEL.unavailable is not None, reason=str(product.KERNEL.unavailable)),
]
WIDTH, ROWS, OUTPUTS = 64, 96, 40


class Conv1D(nn.Module):
    """As transformers' layer of GPT-2: the weight is not transposed."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 8), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def two_layers(first=nn.Linear):
    return nn.Sequential(first(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, OUTPUTS, bias=False))


MODELS = {
    "linear": two_layers,
    "Conv1D": lambda: two_layers(Conv1D),
    "an odd number of outputs": lambda: nn.Sequential(nn.Linear(WIDTH, 65), nn.Linear(65, OUTPUTS)),
    "checkpointed": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(two_layers(), False)),
    "checkpointed, reentrant": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(two_layers(), True)),
    "a sequence": lambda: nn.Sequential(nn.Unflatten(0, (2, -1)), two_layers(), nn.Flatten(0, 1)),
}


@pytest.fixture(autouse=True)
def computed(monkeypatch):
    """Count the products in blocks, and let all be large enough."""
    shapes, original = [], product.product

    def noting(a, b, *others):
        shapes.append((*a.shape, b.size(1)))
        return original(a, b, *others)

    monkeypatch.setattr(linear, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(module, "_LARGE", 1)
    monkeypatch.setattr(product.KERNEL, "is_first_guess", True)
    monkeypatch.setattr(product, "product", noting)
    return shapes


def built(name):
    torch.manual_seed(0)
    return MODELS[name]()


def loop(model, optimizer, steps=3):
    """Train, and return the gradients of all steps."""
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=generator)
        optimizer.zero_grad()
        F.mse_loss(model(x).float(), x[:, :OUTPUTS]).backward()
        found.append([each.grad.clone() for each in model.parameters()])
        optimizer.step()
    return found


def trained(model, **options):
    train = nano(**{"precision": "bf16", "verbose": False, "tune_operators": False, **options})(loop)
    return train(model, torch.optim.SGD(model.parameters(), 0.1)), train


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_gradients_are_those_of_torchs_products(computed, name, precision):
    theirs, _ = trained(built(name), precision=precision, fast_linear=False)
    assert not computed
    ours, train = trained(built(name), precision=precision)
    assert train.report["fast_linear"].status == "applied"
    layers = sum(hasattr(each, "weight") for each in built(name).modules())
    assert len(computed) >= 3 * (3 * layers - 1)  # forward, weight, and input of all but the first
    # In bf16-true, steps after the first begin with other roundings of the parameters.
    for mine, torchs in [*zip(ours, theirs, strict=True)][: 1 if precision == "bf16-true" else None]:
        for a, b in zip(mine, torchs, strict=True):
            assert (a - b).float().norm() < 0.01 * b.float().norm()


def test_fp32_and_other_models_are_torchs_to_the_bit(computed):
    plain = built("linear")
    exact = loop(plain, torch.optim.SGD(plain.parameters(), 0.1))
    found, _ = trained(built("linear"), precision=32)
    assert all(torch.equal(a, b) for x, y in zip(found, exact, strict=True) for a, b in zip(x, y, strict=True))

    def outside(model, optimizer):
        other = built("linear").bfloat16()
        other(torch.ones(ROWS, WIDTH).bfloat16()).float().sum().backward()

    nano(precision="bf16", verbose=False)(outside)(built("linear"), torch.optim.SGD(plain.parameters(), 0.1))
    assert not computed


def test_nothing_is_left_behind(computed):
    trained(built("linear"))
    computed.clear()
    torch.mm(torch.ones(64, 64).bfloat16(), torch.ones(64, 64).bfloat16())
    model = built("linear").bfloat16()
    model(torch.ones(ROWS, WIDTH).bfloat16()).float().sum().backward()
    assert not computed


def test_compiled_models_have_the_same_products(computed):
    ours, _ = trained(built("linear"))
    computed.clear()
    found, train = trained(built("linear"), compile=True)
    assert train.report["compile"].status == "applied"
    assert computed
    for mine, other in zip(found, ours, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert (a - b).norm() < 0.01 * b.norm()
    torch._dynamo.reset()


def test_second_derivatives_functional_gradients_and_other_dtypes_are_right(computed):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))

    def uses(model, optimizer):
        weight = model[0].weight
        (first,) = torch.autograd.grad(model(x).float().square().sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weight)
        parameters = {name: each.detach() for name, each in model.named_parameters()}

        def of_rows(rows):
            return torch.func.functional_call(model, parameters, rows).float().square().sum()

        batched = torch.func.vmap(torch.func.grad(of_rows))(x.view(2, -1, WIDTH)).flatten(0, 1)
        with torch.autocast("cpu", torch.float16):
            half = model[0](x)
        with torch.inference_mode():
            return second, batched, half, model(x).float().clone()

    def found(**options):
        model = built("linear")
        train = nano(verbose=False, tune_operators=False, **options)(uses)
        return train(model, torch.optim.SGD(model.parameters(), 0.1))

    for ours, exact in zip(found(precision="bf16"), found(precision=32), strict=True):
        assert (ours.float() - exact.float()).norm() < 0.05 * exact.float().norm()
    assert computed


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, bias: torch.addmm(bias, a, b, beta=2),
        lambda a, b, bias: torch.addmm(bias, a, b, alpha=0.5),
        lambda a, b, bias: torch.addmm(bias.expand(64, 64).clone(), a, b),
        lambda a, b, bias: torch.addmm(bias[:1], a, b),
        lambda a, b, bias: torch.mm(a, b, out=torch.empty(64, 64).bfloat16().t()),
        lambda a, b, bias: torch.addmm(a[0], b, b, out=a),  # torch copies the bias first
        lambda a, b, bias: torch.mm(a[:, ::2], b[::2]),
        lambda a, b, bias: torch.mm(a[:1].expand(64, 64), b),
        lambda a, b, bias: torch.mm(a.float(), b.float()),
        lambda a, b, bias: torch.mm(a[:0], b),
    ],
)
def test_other_products_are_torchs_to_the_bit(computed, call):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*sizes, generator=generator).bfloat16() for sizes in ((64, 64), (64, 64), (64,))]

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self):
            with torch.autocast("cpu", enabled=False):
                return call(*tensors)

    expected, model = call(*(each.clone() for each in tensors)), Calls()
    run = nano(precision="bf16", verbose=False, fast_linear=True)(lambda model, optimizer: model())
    assert torch.equal(run(model, torch.optim.SGD(model.parameters(), 0.1)), expected)
    assert not computed


@pytest.mark.parametrize("options", [{}, {"tune_operators": False, "fast_linear": True}])
def test_operators_that_are_named_keep_their_dtype(options):
    def loop(model, optimizer):
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.ones(ROWS, WIDTH)).dtype

    model = built("linear")
    run = nano(precision="bf16", fp32_ops=["linear"], verbose=False, **options)(loop)
    assert run(model, torch.optim.SGD(model.parameters(), 0.1)) is torch.float32


def test_a_factor_that_is_no_matrix_raises_what_torch_raises():
    def loop(model, optimizer):
        torch.mm(torch.ones(64, 64).bfloat16(), torch.tensor(1.0).bfloat16())

    model = built("linear")
    with pytest.raises(RuntimeError, match="mat2 must be a matrix"):
        nano(precision="bf16", verbose=False)(loop)(model, torch.optim.SGD(model.parameters(), 0.1))


def test_wrong_shapes_raise_what_torch_raises():
    model = nn.Linear(WIDTH, WIDTH)
    run = nano(precision="bf16", verbose=False)(lambda model, optimizer: model(torch.ones(ROWS, WIDTH + 1)))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        run(model, torch.optim.SGD(model.parameters(), 0.1))
