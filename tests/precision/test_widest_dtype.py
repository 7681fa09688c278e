"""In bf16, operators that refuse it run in fp32, and custom autograd functions get a working backward."""

import re
import warnings
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import distributions, nn

from nano_loop import NanoError, disable_casts
from nano_loop.patching.operators import gives_kernels
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps.precision import Precision

ROWS = torch.tensor([0, 2, 2, 3])
ADJACENCY = torch.tensor([[1.0, 2, 0, 0], [0, 3, 0, 0], [0, 0, 0, 4], [0, 5, 0, 0]])
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
    COO, CSR = ADJACENCY.to_sparse(), ADJACENCY.to_sparse_csr()


def zeros():
    return torch.zeros(4, 2)


#: `test_operator_database.py` covers all of torch's operators among the slow tests.
WAYS = {
    "sparse.mm": lambda h: torch.sparse.mm(COO, h),
    "sparse.mm, CSR": lambda h: torch.sparse.mm(CSR, h),
    "sparse.mm, reduced": lambda h: torch.sparse.mm(CSR, h, "mean"),
    "sparse.addmm": lambda h: torch.sparse.addmm(h, COO, h),
    "sparse mv": lambda h: COO.mv(h[:, 0]),
    "sparse mv, of low numbers": lambda h: h.to_sparse().mv(torch.ones(2)),
    "sparse mv, transposed": lambda h: torch.mv(h.t().to_sparse(), torch.ones(4)),
    "lerp": lambda h: torch.lerp(zeros(), h, 0.5),
    "scatter_add": lambda h: zeros().scatter_add(0, ROWS[:, None].expand(4, 2), h),
    "scatter_add_": lambda h: zeros().scatter_add_(0, ROWS[:, None].expand(4, 2), h),
    "scatter_reduce": lambda h: zeros().scatter_reduce(0, ROWS[:, None].expand(4, 2), h, "amax"),
    "index_add_": lambda h: zeros().index_add_(0, ROWS, h),
    "bilinear": lambda h: F.bilinear(h, torch.ones(4, 2), torch.ones(3, 2, 2)),
    "index_copy_": lambda h: zeros().index_copy_(0, torch.arange(4), h),
    "lerp_": lambda h: zeros().lerp_(h, 0.5),
    "addmm_": lambda h: torch.zeros(4, 4).addmm_(h, h.t()),
    "tensordot": lambda h: torch.tensordot(h, torch.ones(2, 3), 1),
    "det": lambda h: torch.linalg.det(h[:2] + 3 * torch.eye(2)),
    "matrix_exp": lambda h: torch.matrix_exp(h[:2]),
    "i1e": lambda h: torch.special.i1e(h),
    "in place, without a kernel": lambda h: torch.special.i1(h) + (h * 0.3).erfinv_(),
    "into an output": lambda h: torch.mm(h.detach(), torch.ones(2, 2), out=torch.empty(4, 2)) + h,
    "into an output of another shape": lambda h: (
        torch.addmm(zeros(), h.detach(), torch.ones(2, 2), out=torch.empty(0)) + h
    ),
    "embedding_bag": lambda h: F.embedding_bag(
        torch.zeros(4, 2).long(), torch.ones(3, 2), per_sample_weights=h.contiguous(), mode="sum"
    ),
    "into bf16": lambda h: torch.zeros_like(h).index_add(0, ROWS, h.float()),
    "into bf16, in place": lambda h: torch.zeros_like(h).index_add_(0, ROWS, h.float()),
}
PRODUCTS = {"spmm": lambda h: torch.spmm(CSR, h), "@": lambda h: CSR @ h, "addmm": lambda h: torch.addmm(h, CSR, h)}


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layer, self.way = nn.Linear(3, 2), way

    def forward(self, x):
        return self.way(self.layer(x))


@pytest.fixture
def net(step):
    def make(way):
        torch.manual_seed(0)
        model = Net(way)
        step(Precision, precision="bf16").apply(TrainingObjects([model]))
        return model

    return make


X = torch.linspace(-1, 1, 12).reshape(4, 3)


def trained(model, out):
    model.zero_grad()
    out.square().sum().backward()
    return out.detach(), model.layer.weight.grad.clone()


@pytest.mark.parametrize(
    "way", [pytest.param(way, id=name) for name, way in {**WAYS, **(PRODUCTS if gives_kernels() else {})}.items()]
)
def test_operator_that_refuses_mixed_dtypes_computes_in_fp32(net, way):
    model = net(way)
    found = trained(model, model(X))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.layer(X)
    expected = trained(model, way(hidden.float()))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_code_that_was_not_set_up_gets_what_torch_gives(net):
    hidden = torch.rand(4, 2)
    calls = [*WAYS.values(), lambda h: COO @ h, lambda h: CSR @ h]

    def results():
        for call in calls:
            for h in (hidden, hidden.bfloat16()):
                with torch.autocast("cpu", torch.bfloat16):
                    try:
                        yield call(h)
                    except RuntimeError as error:
                        yield str(error)

    expected = [*results()]
    net(lambda h: h)
    for one, other in zip(results(), expected, strict=True):
        assert one == other if isinstance(one, str) else (one.dtype == other.dtype and torch.equal(one, other))


class Product(torch.autograd.Function):
    """Multiplies a saved bf16 tensor by an fp32 gradient in the backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().t()).float()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


def test_custom_function_that_saves_bf16_has_its_backward(net):
    weight = torch.rand(5, 2, requires_grad=True)
    model = net(lambda h: Product.apply(h, weight))
    found = trained(model, model(X)), weight.grad.clone()
    weight.grad = None
    expected = trained(model, F.linear(X, model.layer.weight, model.layer.bias) @ weight.t()), weight.grad
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


class Counted(Product):
    """Records the dtype of each backward, in which an operation succeeds before the products."""

    calls: ClassVar[list] = []

    @staticmethod
    def backward(ctx, gradient):
        (gradient * 2).sum()
        gradients = Product.backward(ctx, gradient)
        Counted.calls.append(gradients[0].dtype)
        return gradients


def test_backward_of_a_custom_function_runs_once_in_the_dtypes_of_its_forward(net):
    weight = torch.rand(5, 2, requires_grad=True)
    model = net(lambda h: Counted.apply(h, weight))
    model(X).sum().backward()

    def in_fp32(h):
        with disable_casts():
            return Counted.apply(h, weight)

    model = net(in_fp32)
    model(X).sum().backward()
    assert Counted.calls == [torch.bfloat16, torch.float32]


def test_custom_function_of_others_raises_as_torch_does(net):
    net(lambda h: h)
    h, weight = torch.rand(4, 2).bfloat16().requires_grad_(), torch.rand(5, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        Product.apply(h, weight).sum().backward()
    assert not getattr(caught.value, "__notes__", ())


def explanation(error):
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def refused(h):
    with torch.autocast("cpu", enabled=False):
        return F.linear(h, torch.ones(3, 2))


def test_error_names_the_operation_the_line_and_what_to_do(net):
    model = net(refused)
    with pytest.raises(RuntimeError) as caught:
        model(X)
    text = explanation(caught.value)
    assert "same dtype" in text, "torch's own words"
    assert "F.linear(h, torch.ones(3, 2))" in text
    assert re.search(rf"test_widest_dtype.py, line {refused.__code__.co_firstlineno + 2}\)", text)
    assert "disable_casts()" in text

    def advised(h):
        with disable_casts():
            return refused(h)

    assert net(advised)(X).dtype is torch.float32, "the advice helps"


def test_error_about_something_else_is_left_alone(net):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        net(lambda h: h @ torch.ones(3, 3))(X)
    assert not getattr(caught.value, "__notes__", ())
    assert not isinstance(caught.value, NanoError)


class Acting(nn.Module):
    """A policy: `forward` returns a distribution, and `act` an array."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(3, 4), make

    def forward(self, x):
        return self.make(self.layer(x))

    def act(self, x):
        with torch.no_grad():
            return self.layer(x).sigmoid().cpu().numpy()


@pytest.mark.parametrize(
    "make",
    [
        lambda h: distributions.Categorical(probs=h.softmax(-1)),
        lambda h: distributions.Categorical(logits=h),
        lambda h: distributions.Beta(h.exp() + 1, h.exp() + 1),
        lambda h: distributions.Gamma(h.exp(), h.exp()),
        lambda h: distributions.Independent(distributions.Normal(h, h.exp()), 1),
        lambda h: distributions.Bernoulli(h.sigmoid()),
        lambda h: distributions.MultivariateNormal(h, torch.eye(4)),
    ],
)
def test_distributions_and_arrays_of_a_model_are_fp32(step, make):
    torch.manual_seed(0)
    model = Acting(make)
    with torch.no_grad():
        sample, exact = model(X).sample(), model(X)
    step(Precision, precision="bf16").apply(TrainingObjects([model]))
    policy = model(X)
    density = policy.log_prob(sample)
    assert density.dtype is policy.sample().log().dtype is torch.float32
    torch.testing.assert_close(density, exact.log_prob(sample), rtol=0.05, atol=0.05)
    density.sum().backward()
    assert model.layer.weight.grad.isfinite().all()
    assert model.act(X).dtype == "float32"


# Includes unchanged operators, whose inputs are all fp32.
TRACED = {
    **{name: WAYS[name] for name in ("lerp", "bilinear", "scatter_add", "index_copy_", "det", "matrix_exp", "i1e")},
    "lerp_ of fp32": lambda h: h + zeros().lerp_(h.detach().float(), 0.1),
    "digamma of fp32": lambda h: torch.digamma(h.float().abs() + 1),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from Dynamo
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("lerp", "index_copy_", "lerp_ of fp32")))
        for name in TRACED
    ],
)
def test_operator_computes_the_same_where_a_part_of_the_model_is_compiled(net, name):
    model = net(TRACED[name])
    expected = trained(model, model(X))
    torch.compiler.reset()
    model.way = torch.compile(TRACED[name], backend="aot_eager")
    torch.testing.assert_close(trained(model, model(X)), expected, rtol=0, atol=0)
