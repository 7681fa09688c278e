"""Operators are computed by the algorithm that is the fastest for their shape, if it is as exact as torch's."""

import functools

import pytest
import torch
import torch.nn.functional as F
from attending import Attending
from loops.pairs import rounding_every_product
from torch import nn
from torch.utils.checkpoint import checkpoint

from autotune.time_for import ALWAYS, Clock, TimeFor
from nano_loop import nano
from nano_loop.autotune import decisions, fp32_operators
from nano_loop.autotune import operators as module
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.tuner import Tuner
from nano_loop.kernels import fp32
from nano_loop.kernels.attention import attention
from nano_loop.kernels.convolution import convolution, gradient_plans
from nano_loop.kernels.convolution.gradient_plans import Plan
from nano_loop.kernels.linear import linear, product
from nano_loop.kernels.replacement import Arguments
from nano_loop.kernels.rnn import recurrent_layer, rnn
from nano_loop.patching.operators.operators import gives_kernels
from nano_loop.policy import policy
from nano_loop.policy import products as rounding

ATTENTION, CONVOLUTION, PRODUCT, LSTM, ROUNDING, LOSS, NORM, FP32_ATTENTION, FP32_PRODUCT = module.OPERATORS
NHWC = torch.channels_last


def normal(*sizes):
    return (torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))) / 2).bfloat16()


def attention_call(batch=2, length=40, dropout=0.0, mask=None):
    return attention.Arguments(*(normal(batch, 3, length, 16) + i for i in range(3)), mask, dropout, False, 0.25)


def convolution_call(images=4, channels=8, outputs=8, groups=1, layout=NHWC):
    inputs, weight = normal(images, channels, 9, 9), normal(outputs, channels // groups, 3, 3)
    tensors = [each.contiguous(memory_format=layout) for each in (normal(images, outputs, 9, 9), inputs, weight)]
    geometry = ([outputs], [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    return gradient_plans.Arguments(*tensors, *geometry, (True, True, True))


def product_call(rows=40, bias=False, transposed=False):
    a = normal(48, rows).t() if transposed else normal(rows, 48)
    return Arguments("product", (a, normal(48, 56), torch.ones(56).bfloat16() if bias else None))


def lstm_call(steps=20, batch=5, has_biases=True, is_trained=True, products="fp32"):
    weights = [normal(*sizes).float() for sizes in ((64, 6), (64, 16), *[(64,), (64,)] * has_biases)]
    states = normal(1, batch, 16).float(), normal(1, batch, 16).float()
    numbers = has_biases, 1, 0.5, True, False, False, is_trained, products
    return rnn.Arguments(recurrent_layer.LSTM, normal(steps, batch, 6).float(), None, states, (*weights,), *numbers)


def rounding_call(kind=policy.PRODUCT, rows=40, last=56, numbers=(), bias=None):
    return Arguments(kind, (normal(rows, 48).float(), normal(48, last).float(), bias), numbers)


def loss_call(rows=40, reduction=1, smoothing=0.0):
    target = torch.arange(rows) % 48
    return Arguments(
        "cross_entropy", (normal(rows, 48).float(), target, None, reduction, -100, smoothing), is_differentiated=True
    )


def norm_call(rows=40, width=48, is_affine=True):
    parameters = (normal(width).float(), normal(width).float()) if is_affine else (None, None)
    return Arguments("layer_norm", (normal(rows, width).float(), [width], *parameters, 1e-5))


def fp32_product_call(rows=40, bias=False, transposed=False):
    tensors = (None if tensor is None else tensor.float() for tensor in product_call(rows, bias, transposed).arguments)
    return Arguments("product", (*tensors,))


def fp32_attention_call(batch=2, length=40, is_causal=False, mask=None):
    tensors = (normal(batch, 3, length, 16).float() + i for i in range(3))
    return Arguments("attention", (*tensors, mask), (is_causal,))


def by_flash_kernel(query, key, value, mask):
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, attn_mask=mask)


def by_convolution_kernel(*arguments):
    return torch.ops.aten.convolution_backward(*arguments)


def by_onednn(call):
    return torch.lstm(*call.of_torch)


#: Of each operator: its calls, its algorithms, torch's first, and calls of which so many differ.
CASES = {
    ATTENTION: (
        attention_call,
        dict.fromkeys((attention.TORCH, attention.BLOCKS), attention.ALGORITHMS[attention.TORCH]),
        [
            {},
            {"batch": 1},
            {"batch": 3},
            {"batch": 4},
            {"length": 41},
            {"dropout": 0.1},
            {"mask": torch.ones(40, 40, dtype=torch.bool)},
        ],
        6,
    ),
    CONVOLUTION: (
        convolution_call,
        dict.fromkeys((Plan().name, Plan(weight="product").name, Plan("fp32", "fp32").name), by_convolution_kernel),
        [{"images": 5}, {"images": 8}, {"images": 9}, {"images": 9, "layout": torch.contiguous_format}],
        3,
    ),
    PRODUCT: (
        product_call,
        dict.fromkeys((linear.TORCH, linear.BLOCKS), lambda a, b, bias: a @ b),
        [{"rows": 33}, {}, {"rows": 64}, {"rows": 65}, {"bias": True}, {"transposed": True}],
        4,
    ),
    LSTM: (
        lstm_call,
        dict.fromkeys((fp32.TORCH, fp32.COMPILED), by_onednn),
        [
            *({}, {"steps": 21}, {"batch": 9}, {"is_trained": False}, {"has_biases": False}),
            *({"products": "bf16"}, {"products": "rounded"}),
        ],
        6,
    ),
    ROUNDING: (
        rounding_call,
        dict.fromkeys((rounding.FP32, rounding.ROUNDED), lambda a, b, bias: a @ b),
        [
            {"rows": 33},
            {},
            {"rows": 64},
            {"rows": 65},
            {"last": 57},
            {"kind": policy.CONVOLUTION},
            {"kind": policy.CONVOLUTION, "numbers": ([1, 1], 2)},
            {"bias": torch.ones(56)},
        ],
        6,
    ),
    LOSS: (
        loss_call,
        dict.fromkeys((fp32.TORCH, fp32.COMPILED), torch.ops.aten.cross_entropy_loss),
        [{"rows": 33}, {}, {"rows": 65}, {"reduction": 2}, {"smoothing": 0.1}],
        3,
    ),
    NORM: (
        norm_call,
        dict.fromkeys((fp32.TORCH, fp32.COMPILED), torch.ops.aten.native_layer_norm),
        [{"rows": 33}, {}, {"rows": 64}, {"rows": 65}, {"width": 56}, {"is_affine": False}],
        4,
    ),
    FP32_ATTENTION: (
        fp32_attention_call,
        dict.fromkeys((fp32.TORCH, fp32.COMPILED), by_flash_kernel),
        [{}, {"batch": 1}, {"batch": 3}, {"length": 41}, {"is_causal": True}, {"mask": torch.zeros(40, 40)}],
        6,
    ),
    FP32_PRODUCT: (
        fp32_product_call,
        dict.fromkeys((fp32.TORCH, fp32.COMPILED), lambda a, b, bias: a @ b),
        [{"rows": 33}, {}, {"rows": 64}, {"rows": 65}, {"bias": True}, {"transposed": True}],
        4,
    ),
}
EVERY = pytest.mark.parametrize("operator", CASES, ids=lambda operator: operator.rule)


class Bench:
    """An operator whose algorithms take their time of a clock."""

    def __init__(self, operator, wrong=(), budget=ALWAYS, choices=None):
        self.make, self.algorithms, self.variants, self.count = CASES[operator]
        self.names, self.wrong, self.calls, self.slow = [*self.algorithms], wrong, [], set()
        self.clock = Clock()
        self.tuner = Tuner(choices or Choices(None), budget, self.clock)
        self.choose = operator.chooser(self.tuner)

    def named(self, name):
        def compute(*arguments):
            self.calls.append(arguments)
            self.clock.now += 1.0 if name in self.slow else 0.01
            out = self.algorithms[name](*arguments)
            if name not in self.wrong:
                return out
            return out * 1.1 if torch.is_tensor(out) else tuple(each * 1.1 for each in out)

        return compute

    def __call__(self, guess, fast=None, possible=None, **how):
        self.slow = {name for name in self.names if name != fast}
        return self.choose(self.make(**how), lambda: {name: self.named(name) for name in possible or self.names}, guess)


@EVERY
def test_the_fastest_algorithm_is_kept_for_this_run_and_later_ones(operator):
    names = [*CASES[operator][1]]
    for fast in names:
        for guess in names:
            bench = Bench(operator)
            assert {bench(guess, fast) for _ in range(3)} == {fast}
            assert bench.tuner.measured == 1
            assert Bench(operator, budget=TimeFor(0.0), choices=bench.tuner.choices)(guess) == fast


@EVERY
def test_wrong_algorithm_is_rejected_and_one_that_is_none_here_is_not_taken(operator):
    torchs, other, *_ = CASES[operator][1]
    bench = Bench(operator, wrong={other})
    assert bench(other, other) == torchs
    bench = Bench(operator)
    assert bench(torchs, other) == other
    assert Bench(operator, choices=bench.tuner.choices)(torchs, possible=[torchs]) == torchs
    ((key, choice),) = bench.tuner.choices.all().items()
    bench.tuner.choices.put(key, choice._replace(algorithm="magic"))  # of another version
    assert Bench(operator, choices=bench.tuner.choices)(torchs, other) == torchs


@EVERY
def test_shapes_are_measured_apart_and_batches_of_about_the_same_size_together(operator):
    bench = Bench(operator)
    for how in bench.variants:
        bench(bench.names[0], **how)
    assert bench.tuner.measured == bench.count


@EVERY
def test_without_time_the_guess_is_taken_until_the_next_turn(operator):
    budget = TimeFor(0.0)
    bench = Bench(operator, budget=budget)
    torchs, other, *_ = bench.names
    assert [bench(torchs, other) for _ in range(3)] == [torchs] * 3
    assert len(budget.asked) == 1
    budget.seconds, budget.turn = float("inf"), 1
    assert bench(torchs, other) == other


@EVERY
def test_one_algorithm_and_tensors_that_are_too_large_are_not_measured(operator, monkeypatch):
    budget = TimeFor(float("inf"))
    bench = Bench(operator, budget=budget)
    torchs, other, *_ = bench.names
    assert bench(torchs, possible=[torchs]) == torchs
    assert not budget.asked
    for place in (module, fp32_operators):
        monkeypatch.setattr(place, "MOST_ELEMENTS", 1)
    monkeypatch.setattr(fp32_operators, "_MIN_ROWS", 10)
    chosen = Bench(operator)(torchs, other)
    assert chosen == (other if operator in (PRODUCT, FP32_PRODUCT) else torchs)  # of which some rows are measured


def test_of_large_products_and_losses_some_rows_and_of_long_sequences_some_steps_are_measured(monkeypatch):
    for place in (module, fp32_operators):
        monkeypatch.setattr(place, "MOST_ELEMENTS", 1 << 12)
    monkeypatch.setattr(fp32_operators, "_MIN_ROWS", 1)
    monkeypatch.setattr(module, "_MULTIPLICATIONS", 1)
    layers, losses = Bench(LSTM), Bench(LOSS)
    for operator, guess in ((PRODUCT, linear.TORCH), (FP32_PRODUCT, fp32.TORCH)):
        products = Bench(operator)
        products(guess, rows=100)
        assert {arguments[0].shape for arguments in products.calls} == {((1 << 12) // 56, 48)}
    losses(fp32.TORCH, rows=100)
    assert {arguments[0].shape for arguments in losses.calls} == {((1 << 12) // 48, 48)}
    layers(fp32.TORCH, batch=1)
    assert {len(arguments[0].inputs) for arguments in layers.calls} == {16}  # of 20


@EVERY
def test_shape_that_is_forgotten_until_the_recomputation_has_the_algorithm_of_its_forward(operator, monkeypatch):
    monkeypatch.setattr(decisions, "_MOST_KINDS", 1)
    bench = Bench(operator)
    torchs, other, *_ = bench.names
    assert bench(torchs, other) == other
    bench(torchs, other, **bench.variants[-1])
    monkeypatch.setattr(decisions, "in_backward", lambda: True)
    assert bench(torchs, other) == other
    assert bench(torchs, possible=[torchs]) == (torchs if not operator.has_gradients else other)


@EVERY
def test_measurements_draw_no_random_numbers_and_call_no_hooks_of_the_loop(operator):
    state, saved = torch.get_rng_state(), []
    bench = Bench(operator)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda each: each), torch.no_grad():
        bench(bench.names[0], **bench.variants[-2])
    assert bench.tuner.measured == 1
    assert saved == []
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@EVERY
def test_measurements_do_not_depend_on_torchs_default_dtype(operator, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        bench = Bench(operator)
        torchs, other, *_ = bench.names
        assert bench(torchs, other) == other
    finally:
        torch.set_default_dtype(before)


# --- in runs ---


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Attending()

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


def test_recomputation_takes_the_algorithm_of_its_forward(measuring, monkeypatch):
    monkeypatch.setattr(attention, "MIN_SCORES", 1)
    monkeypatch.setattr(attention.blocked_attention, "supports", lambda *_: True)
    monkeypatch.setattr(attention.blocked_attention.KERNEL, "unavailable", None)
    monkeypatch.setitem(attention.ALGORITHMS, attention.BLOCKS, attention.ALGORITHMS[attention.TORCH])
    monkeypatch.setattr(Tuner, "_measure", lambda self, *_: self.choices.all()[None])
    monkeypatch.setattr(Tuner, "choose", lambda self, *_: attention.TORCH if self._budget.left() > 0 else None)
    taken, algorithm = [], attention._algorithm
    monkeypatch.setattr(attention, "_algorithm", lambda call: taken.append(algorithm(call)) or taken[-1])
    torch.manual_seed(0)
    model = Checkpointed()
    optimizer, tokens = torch.optim.SGD(model.parameters(), 0.1), torch.randint(20, (4, 16))
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)

    @nano(precision="bf16", verbose=False)
    def train(model, optimizer, other):
        other.step()
        for _ in range(2):
            before = model(tokens).square().mean()
            other.step()  # after the second step there is time for a measurement
            model(tokens).square().mean().backward()
            before.backward()
            optimizer.step()

    train(model, optimizer, other)
    assert len(taken) == 2 * 2 * 2  # each is computed twice
    assert set(taken) == {attention.BLOCKS, attention.TORCH}  # the guess first, and then the fastest


@pytest.mark.skipif(
    not gives_kernels() or product.KERNEL.unavailable is not None,
    reason=product.KERNEL.unavailable or "it needs torch 2.9",
)
@pytest.mark.parametrize("precision", ["bf16", "bf16-products"])
def test_layers_and_their_gradients_are_measured_in_a_run_without_changing_its_random_numbers(monkeypatch, precision):
    rounding_every_product(monkeypatch)
    monkeypatch.setattr(linear, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(rnn, "MIN_MULTIPLICATIONS", 1)
    tuner = Tuner(Choices(None), ALWAYS)
    monkeypatch.setattr("nano_loop.steps.tune_operators.Tuner", lambda *_: tuner)

    def loop(model, optimizer):
        torch.manual_seed(1)
        for _ in range(4):
            model[1:](F.relu(model[0](torch.randn(20, 5, 24))[0])).float().square().sum().backward()
            optimizer.step()
        return torch.rand(1)

    def drawn(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LSTM(24, 64), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 40, bias=False))
        train = nano(precision=precision, verbose=False, **options)(loop)
        return train(model, torch.optim.SGD(model.parameters(), 0.1))

    in_bf16 = {"fast_linear": True} if precision == "bf16" else {}
    assert torch.equal(drawn(**in_bf16), drawn(tune_operators=False, fast_rnn=False))
    words = {"bf16": "", "bf16-products": "rounded "}[precision]
    measured = {key.removeprefix(words) for key in tuner.choices.all()}
    assert measured == {
        f"{'' if words else 'bf16 '}lstm 2^5 2^3 24 1 64 biases trained",
        "product 2^7 by 64 by 48 NT plus a row",
        "product 2^7 by 48 by 40 NT",
        "product 2^7 by 40 by 48 NN",
        "product 2^7 by 48 by 64 NN",
        "product 40 by 2^7 by 48 TN",
        "product 48 by 2^7 by 64 TN",
    }


def test_backward_of_convolutions_takes_the_chosen_plan():
    call, asked = convolution_call(groups=8), []

    def choose(call, algorithms, guess):
        asked.append((set(algorithms()), guess))
        return Plan("fp32", "fp32").name

    kernel = functools.partial(lambda keys, *arguments: by_convolution_kernel(*arguments))
    ours = convolution.faster_backward(kernel, choose)(None, *call)
    ((names, guess),) = asked
    assert names == {"torch/torch", "torch/fp32", "fp32/torch", "fp32/fp32"}
    assert guess in names
    for found, expected in zip(ours, by_convolution_kernel(*call), strict=True):
        assert (found - expected).float().norm() < 0.01 * expected.float().norm()
