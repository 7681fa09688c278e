"""Graphs keep rounded factors in bf16: with the same gradients, and only where nothing else can see it."""

import contextlib
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
from nano_loop.steps import products

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


@pytest.fixture
def kept_in_fp32():
    """A context in which graphs keep fp32 tensors."""

    @contextlib.contextmanager
    def kept():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(narrow_copies, "MIN_ELEMENTS", 1 << 60)
            yield

    return kept


def built(name, dtype=FP32):
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model, x = build().to(dtype), torch.randn(shape, dtype=dtype)
    if x.dim() == 4:
        model, x = (each.to(memory_format=torch.channels_last) for each in (model, x))
    return model, x


def accelerated(function, *args, **options):
    return nano_loop.nano(verbose=False, precision="auto", tune_operators=False, **options)(function)(*args)


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


def gradients(model, x, **options):
    return torch.autograd.grad(model(x).square().mean(), [x, *model.parameters()], **options)


def leaf(x):
    return x.clone().requires_grad_()


@is_each
def test_gradients_are_bitwise_those_of_tensors_kept_in_fp32(name, kept_in_fp32):
    model, x = built(name)
    ours = accelerated(gradients, model, leaf(x))
    with kept_in_fp32():
        expected = accelerated(gradients, model, leaf(x))
    assert all(map(torch.equal, ours, expected))
    assert {each.dtype for each in ours} == {FP32}


def test_factors_results_and_outputs_are_kept_in_bf16():
    def kept(model, x):
        return kept_by(model(x.mul(2)))

    torch.manual_seed(0)
    x = leaf(torch.randn(IMAGES).to(memory_format=torch.channels_last))
    of_images = accelerated(kept, convolutional().to(memory_format=torch.channels_last), x)
    assert of_images["Convolution", "input"] == of_images["Relu", "result"] == {BF16}
    if not products.blocked_convolution.KERNEL.uses_amx:  # whose sums are in fp32
        assert of_images["NativeBatchNorm", "input"] == {BF16}
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
def test_second_derivatives_transforms_and_hooks_get_fp32(name, kept_in_fp32):
    model, x = built(name)

    def train(model, x):
        first = gradients(model, x, create_graph=True)
        second = []
        if not isinstance(model, Attending):  # torch's attention has no second derivative
            second = torch.autograd.grad(first[0].square().sum(), [*model.parameters()], allow_unused=True)
        batched = torch.autograd.grad(
            model(x), x, torch.ones(2, *model(x).shape), is_grads_batched=True, materialize_grads=True
        )
        parameters = {key: each.detach() for key, each in model.named_parameters()}
        by_transform = torch.func.grad(lambda given: torch.func.functional_call(model, given, (x.detach(),)).sum())
        return [*first, *(each for each in second if each is not None), *batched, *by_transform(parameters).values()]

    ours = accelerated(train, model, leaf(x))
    with kept_in_fp32():
        expected = accelerated(train, model, leaf(x))
    for found, other in zip(ours, expected, strict=True):
        assert found.dtype is FP32
        assert (found - other).norm() <= 2**-7 * other.norm() + 1e-6


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


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_recompute_the_same_gradients(use_reentrant):
    model, x = built("perceptron")

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    ours = accelerated(
        lambda model, x: [each.clone() for each in gradients_in_place(model, x)], Checkpointed(), leaf(x)
    )
    expected = accelerated(lambda model, x: [each.clone() for each in gradients_in_place(model, x)], model, leaf(x))
    assert all(map(torch.equal, ours, expected))


def gradients_in_place(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [each.grad for each in model.parameters()]


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


def past_the_counter(hidden):
    hidden.data.mul_(2)


def test_write_between_a_relu_and_a_product_is_torchs_error():
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        accelerated(gradients, Written(in_place, before=True), leaf(torch.randn(ROWS)))


def part_past_the_counter(hidden):
    hidden[1:].data.mul_(2)


@pytest.mark.parametrize("write", [in_place, past_the_counter, part_past_the_counter])
def test_product_after_a_write_reads_the_new_values(write, kept_in_fp32):
    torch.manual_seed(0)
    model, x = Written(write, before=False), torch.randn(ROWS)

    def train(model):
        out = model(x)
        return out, *torch.autograd.grad(out.square().mean(), [model.third.weight])

    ours = accelerated(train, model)
    with kept_in_fp32():
        expected = accelerated(train, model)
    assert all(map(torch.equal, ours, expected))


def test_alias_of_a_tensor_that_is_read_before_the_products_may_be_written_to_between_them(kept_in_fp32):
    torch.manual_seed(0)
    model, x = Written(None, before=False), torch.randn(ROWS)

    def forward(x):
        hidden = torch.relu(model.first(x))
        alias = hidden.data
        out = model.second(hidden).detach()
        alias.mul_(2)
        return out + model.third(hidden)

    model.forward = forward
    ours = accelerated(third_of, model, x)
    with kept_in_fp32():
        expected = accelerated(third_of, model, x)
    assert torch.equal(ours, expected)


def third_of(model, x):
    return torch.autograd.grad(model(x).square().mean(), [model.third.weight])[0]


def test_batch_norm_of_a_result_that_was_written_to_keeps_the_new_values(kept_in_fp32):
    torch.manual_seed(0)
    model, x = convolutional().to(memory_format=torch.channels_last), torch.randn(IMAGES)
    x = leaf(x.to(memory_format=torch.channels_last))

    def train(model, x):
        hidden = model[0](x)
        hidden.data.mul_(2).add_(1)
        return torch.autograd.grad(model[1](hidden).relu().square().mean(), [hidden, model[1].weight])

    ours = accelerated(train, model, x)
    with kept_in_fp32():
        expected = accelerated(train, model, x)
    assert all(map(torch.equal, ours, expected))


def test_gradients_are_those_of_the_values_before_a_write():
    """torch raises an error here: it keeps no copy."""
    torch.manual_seed(0)
    model, x = Written(in_place, before=False), leaf(torch.randn(ROWS))

    def train(model):
        return torch.autograd.grad(model(x).square().mean(), [*model.parameters()])

    ours = accelerated(train, model)
    model.write, twice = (lambda hidden: None), model.forward

    def forward(x):
        hidden = torch.relu(model.first(x))
        return model.second(hidden) + model.third(-1 * hidden.detach())

    model.forward = forward
    expected = accelerated(train, model)
    model.forward = twice
    for place in (2, 3, 4, 5):  # second and third layer
        assert (ours[place] - expected[place]).norm() <= 2**-7 * expected[place].norm() + 1e-7


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (perceptron(nn.Tanh), "mat1"),  # the backward of tanh reads its output in fp32
        (perceptron().requires_grad_(False), "mat1"),  # no gradient reads the factors
    ],
)
def test_tensors_that_stay_anyway_are_not_copied(model, name):
    kept = accelerated(lambda model, x: kept_by(model(x)), model, leaf(torch.randn(ROWS)))
    assert kept.get(("Addmm", name), {FP32}) == {FP32}
    assert BF16 not in {dtype for (operator, _), dtypes in kept.items() for dtype in dtypes if operator != "Relu"}
