"""Runs in bf16 compute large products in blocks; see `test_training`, too."""

import pytest
import torch
from torch import nn

from nano_loop import nano
from steps.kernels.cases import BY_NAME, LINEARS, ROWS, WIDTH, assert_near, normal, trained, use_for_all_sizes


@pytest.fixture(autouse=True)
def every_size_is_worth_it(monkeypatch):
    use_for_all_sizes(monkeypatch, BY_NAME["fast_linear"])


def built():
    return LINEARS["linear"].built()


def test_compiled_models_have_the_same_products(called):
    ours, _ = trained(LINEARS["linear"])
    called.clear()
    found, report = trained(LINEARS["linear"], compile=True)
    assert report["compile"].status == "applied"
    assert "product" in called
    assert_near(found, ours, LINEARS["linear"].bounds)
    torch._dynamo.reset()


def test_second_derivatives_functional_gradients_and_other_dtypes_are_right(called):
    x = normal(ROWS, WIDTH)

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
        model = built()
        train = nano(verbose=False, tune_operators=False, **options)(uses)
        return train(model, torch.optim.SGD(model.parameters(), 0.1))

    for ours, exact in zip(found(precision="bf16"), found(precision=32), strict=True):
        assert (ours.float() - exact.float()).norm() < 0.05 * exact.float().norm()
    assert "product" in called


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
def test_other_products_are_torchs_to_the_bit(called, call):
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
    assert not called


@pytest.mark.parametrize("options", [{}, {"tune_operators": False, "fast_linear": True}])
def test_operators_that_are_named_keep_their_dtype(options):
    def loop(model, optimizer):
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.ones(ROWS, WIDTH)).dtype

    model = built()
    run = nano(precision="bf16", fp32_ops=["linear"], verbose=False, **options)(loop)
    assert run(model, torch.optim.SGD(model.parameters(), 0.1)) is torch.float32


def test_a_factor_that_is_no_matrix_raises_what_torch_raises():
    def loop(model, optimizer):
        torch.mm(torch.ones(64, 64).bfloat16(), torch.tensor(1.0).bfloat16())

    model = built()
    with pytest.raises(RuntimeError, match="mat2 must be a matrix"):
        nano(precision="bf16", verbose=False)(loop)(model, torch.optim.SGD(model.parameters(), 0.1))


def test_wrong_shapes_raise_what_torch_raises():
    model = nn.Linear(WIDTH, WIDTH)
    run = nano(precision="bf16", verbose=False)(lambda model, optimizer: model(torch.ones(ROWS, WIDTH + 1)))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        run(model, torch.optim.SGD(model.parameters(), 0.1))
