"""Graphs keep rounded factors in bf16: with the same gradients, and only where nothing else can see it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from loops.pairs import rounding_every_product
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import nano_loop
from nano_loop.kernels import narrow_copies
from nano_loop.kernels.linear import product
from nano_loop.kernels.norm import norms
from nano_loop.patching.operators import gives_kernels

pytestmark = pytest.mark.skipif(
    product.KERNEL.unavailable is not None or not gives_kernels(), reason=f"{product.KERNEL.unavailable}, or torch 2.8"
)
BF16, FP32 = torch.bfloat16, torch.float32


class Attending(nn.Module):
    """Attention of separate projections, or of parts of one."""

    def __init__(self, parts):
        super().__init__()
        self.norm, self.parts = nn.LayerNorm(64), parts
        self.projections = nn.ModuleList(nn.Linear(64, 192 // count) for count in [parts] * parts)
        self.out = nn.Linear(64, 64)

    def forward(self, x):
        normed = self.norm(x)
        found = [layer(normed) for layer in self.projections]
        found = found if self.parts == 3 else found[0].chunk(3, -1)
        query, key, value = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in found)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).flatten(2))


class Multiplied(nn.Module):
    """Products without a transposed weight, as in GPT-2: the copy is the first factor of a backward's product."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(64, 64) / 8) for _ in range(2))

    def forward(self, x):
        hidden = torch.relu(x @ self.first)
        return torch.addmm(self.second[0], hidden, self.second)


def convolutional(norm=nn.BatchNorm2d):
    layers = []
    for channels in (16, 32):
        layers += [nn.Conv2d(channels, 32, 3, padding=1, bias=False), norm(32), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(32, 16, 1))


def perceptron(activation=nn.ReLU):
    return nn.Sequential(nn.Linear(64, 96), activation(), nn.Linear(96, 96), activation(), nn.Linear(96, 32))


IMAGES, ROWS, WORDS = (8, 16, 12, 12), (80, 64), (3, 40, 64)
MODELS = {
    "convolutions": (functools.partial(convolutional, nn.Identity), IMAGES),
    "perceptron": (perceptron, ROWS),
    "attention": (functools.partial(Attending, 3), WORDS),
    "attention of one projection": (functools.partial(Attending, 1), WORDS),
    "first factors": (Multiplied, ROWS),
}
is_each = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch):
    rounding_every_product(monkeypatch)
    monkeypatch.setattr(norms, "MIN_ELEMENTS", 1)


def built(name):
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, x = build(), torch.randn(shape)
    if x.dim() == 4:
        model, x = (each.to(memory_format=torch.channels_last) for each in (model, x))
    return model, x


def accelerated(function, *args):
    return nano_loop.nano(verbose=False, precision="auto", tune_operators=False)(function)(*args)


def assert_as_if_kept_in_fp32(function, *args):
    """Check that results have the bits of a run in which graphs keep fp32 tensors."""
    ours = accelerated(function, *args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow_copies, "MIN_ELEMENTS", 1 << 60)
        assert all(map(torch.equal, ours, accelerated(function, *args)))
    assert {each.dtype for each in ours} == {FP32}


def kept_by(out):
    """Return the dtypes of the tensors that a graph keeps, by operator and name, without weights."""
    found, seen, nodes = {}, set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [behind for behind, _ in node.next_functions]
        for name in dir(node):
            with torch.no_grad():
                kept = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(kept, torch.Tensor) and kept.dim() > 1:
                found.setdefault((node.name().removesuffix("Backward0"), name[7:]), set()).add(kept.dtype)
    return found


def gradients(model, x):
    return torch.autograd.grad(model(x).square().mean(), [x, *model.parameters()])


def leaf(x):
    return x.clone().requires_grad_()


@is_each
def test_gradients_are_bitwise_those_of_tensors_kept_in_fp32(name):
    model, x = built(name)
    assert_as_if_kept_in_fp32(gradients, model, leaf(x))


def test_factors_results_and_outputs_are_kept_in_bf16():
    def kept(model, x):
        return kept_by(model(x.mul(2)))

    torch.manual_seed(0)
    x = leaf(torch.randn(IMAGES).to(memory_format=torch.channels_last))
    of_images = accelerated(kept, convolutional().to(memory_format=torch.channels_last), x)
    kept_tensors = ("Convolution", "input"), ("NativeBatchNorm", "input"), ("Relu", "result")
    assert [of_images[each] for each in kept_tensors] == [{BF16}] * 3
    of_words = accelerated(kept, *built("attention"))
    names = ("query", "key", "value", "output")
    assert of_words["Addmm", "mat1"] == {BF16}
    assert {*map(str, (of_words["ScaledDotProductFlashAttentionForCpu", each] for each in names))} == {str({BF16})}


def test_fp32_tensor_is_freed_once_a_product_has_rounded_it():
    freed = []

    class Freed(nn.Module):
        def forward(self, x):
            out = torch.relu(x)
            storage = torch.multiprocessing.reductions.StorageWeakRef(out.untyped_storage())
            freed.append(storage.expired)
            return out

    def train(model, x):
        out = model(x)
        freed.append(freed[0]())
        return out

    model = nn.Sequential(nn.Linear(64, 96), Freed(), nn.Linear(96, 32))
    accelerated(train, model, torch.randn(ROWS))
    assert freed[1]


@pytest.mark.parametrize("in_nhwc", [True, False])
def test_batch_norm_of_a_copy_is_as_exact_as_torchs(in_nhwc):
    torch.manual_seed(0)
    x = torch.randn(IMAGES).mul(3).add(5).bfloat16()
    gradient, weight = torch.randn(IMAGES), torch.randn(16)
    if in_nhwc:
        x, gradient = (each.to(memory_format=torch.channels_last) for each in (x, gradient))

    def of(dtype):
        wide = x.to(dtype)
        mean, inverse = wide.mean((0, 2, 3)), (wide.var((0, 2, 3), correction=0) + 1e-5).rsqrt()
        args = weight.to(dtype), None, None, mean, inverse, True, 1e-5, [True] * 3
        return args, torch.ops.aten.native_batch_norm_backward(gradient.to(dtype), wide, *args)

    args, torchs = of(FP32)
    ours, exact = norms.batch_norm_backward(gradient, x, *args), of(torch.float64)[1]
    for found, other, true in zip(ours, torchs, exact, strict=True):
        assert found.dtype is FP32
        assert (found - true).norm() <= 2 * (other - true).norm() + 1e-7 * true.norm()


@is_each
def test_backward_may_run_twice_and_after_the_run(name):
    model, x = built(name)
    x = leaf(x)

    def train(model):
        loss = model(x.mul(1)).square().mean()
        twice = [torch.autograd.grad(loss, [*model.parameters()], retain_graph=True) for _ in range(2)]
        assert all(map(torch.equal, *twice))
        return loss, twice[0]

    loss, inside = accelerated(train, model)
    outside = torch.autograd.grad(loss, [*model.parameters()])
    assert all((one - other).norm() <= 2**-6 * one.norm() + 1e-6 for one, other in zip(inside, outside, strict=True))


@is_each
def test_hooks_of_the_program_pack_fp32(name):
    model, x = built(name)
    packed = set()

    def pack(tensor):
        packed.add(tensor.dtype)
        return tensor

    def train(model, x):
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(x).square().mean()
        loss.backward()

    accelerated(train, model, x)
    assert packed - {torch.int64} == {FP32}


def test_outputs_that_hooks_have_packed_are_left_to_them():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
            self.head, self.pack = nn.Linear(64, 32), None

        def forward(self, x):
            return self.head(self.inner(x) if self.pack is None else self.pack(self.inner, x))

    def offloaded(inner, x):
        with save_on_cpu():
            return inner(x)

    def checkpointed(inner, x):
        return checkpoint(inner, x, use_reentrant=False)

    calls = []
    torch.manual_seed(0)
    model, x = Packed(), torch.randn(ROWS)
    model.inner[0].register_forward_hook(lambda *_: calls.append(None))
    expected = accelerated(gradients, model, leaf(x))
    for model.pack, count in ((offloaded, 1), (checkpointed, 2)):
        calls.clear()
        assert all(map(torch.equal, accelerated(gradients, model, leaf(x)), expected))
        assert len(calls) == count


class Written(nn.Module):
    """Calls a function with the output of a ReLU before or after a product has read it."""

    def __init__(self, write, before):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.write, self.before = write, before

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        if self.before:
            self.write(hidden)
        out = self.second(hidden)
        if not self.before:
            self.write(hidden)
        return out + self.third(hidden)


def in_place(hidden):
    with torch.no_grad():
        hidden.mul_(-1)


WRITES = {
    "in place": in_place,
    "past the counter": lambda hidden: hidden.data.mul_(2),
    "to a part, past the counter": lambda hidden: hidden[1:].data.mul_(2),
}


def test_write_between_a_relu_and_a_product_is_torchs_error():
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        accelerated(gradients, Written(in_place, before=True), leaf(torch.randn(ROWS)))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_product_after_a_write_reads_the_new_values(write):
    torch.manual_seed(0)
    model, x = Written(write, before=False), torch.randn(ROWS)

    def train(model):
        out = model(x)
        return out, *torch.autograd.grad(out.square().mean(), [model.third.weight])

    assert_as_if_kept_in_fp32(train, model)


def test_alias_of_a_tensor_that_is_read_before_the_products_may_be_written_to_between_them():
    torch.manual_seed(0)
    model, x = Written(None, before=False), torch.randn(ROWS)

    def forward(x):
        hidden = torch.relu(model.first(x))
        alias = hidden.data
        out = model.second(hidden).detach()
        alias.mul_(2)
        return out + model.third(hidden)

    model.forward = forward
    assert_as_if_kept_in_fp32(lambda model: torch.autograd.grad(model(x).square().mean(), [model.third.weight]), model)


def test_batch_norm_of_a_result_that_was_written_to_keeps_the_new_values():
    torch.manual_seed(0)
    model, x = convolutional().to(memory_format=torch.channels_last), torch.randn(IMAGES)
    x = leaf(x.to(memory_format=torch.channels_last))

    def train(model, x):
        hidden = model[0](x)
        hidden.data.mul_(2).add_(1)
        return torch.autograd.grad(model[1](hidden).relu().square().mean(), [hidden, model[1].weight])

    assert_as_if_kept_in_fp32(train, model, x)


def test_gradients_are_those_of_the_values_before_a_write():
    """torch raises an error here: it keeps no copy."""
    torch.manual_seed(0)
    model, x = Written(in_place, before=False), leaf(torch.randn(ROWS))

    def train(model):
        return torch.autograd.grad(model(x).square().mean(), [*model.parameters()])

    ours = accelerated(train, model)

    def forward(x):
        hidden = torch.relu(model.first(x))
        return model.second(hidden) + model.third(-1 * hidden.detach())

    model.forward = forward
    expected = accelerated(train, model)
    for place in (2, 3, 4, 5):  # second and third layer
        assert (ours[place] - expected[place]).norm() <= 2**-7 * expected[place].norm() + 1e-7


@pytest.mark.parametrize(
    "model",
    [
        perceptron(nn.Tanh),  # whose backward reads its output in fp32
        perceptron().requires_grad_(False),  # no gradient reads the factors
    ],
)
def test_tensors_that_stay_anyway_are_not_copied(model):
    kept = accelerated(lambda model, x: kept_by(model(x)), model, leaf(torch.randn(ROWS)))
    assert kept.get(("Addmm", "mat1"), {FP32}) == {FP32}
    assert BF16 not in {dtype for (operator, _), dtypes in kept.items() for dtype in dtypes if operator != "Relu"}
