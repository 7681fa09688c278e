"""Operators use the fastest algorithm for their shape, if it is as exact as torch's."""

import pytest
import torch
import torch.nn.functional as F
from attending import Attending
from loops.pairs import rounding_every_product
from torch import nn
from torch.utils.checkpoint import checkpoint

from autotune.time_for import ALWAYS, Clock, TimeFor
from nano_loop import nano
from nano_loop.autotune.choices import Choices
from nano_loop.autotune.race import Generation, race_of
from nano_loop.autotune.tuner import Tuner
from nano_loop.kernels import override
from nano_loop.kernels.attention import attention, blocked_attention, flash_attention
from nano_loop.kernels.convolution import convolution, rounded_convolution
from nano_loop.kernels.convolution.gradient_plans import Plan
from nano_loop.kernels.head import cross_entropy
from nano_loop.kernels.linear import fp32_product, linear, product
from nano_loop.kernels.norm import norms
from nano_loop.kernels.override import COMPILED, KEPT, REFERENCE, ROUNDED, TORCH
from nano_loop.kernels.rnn import rnn
from nano_loop.kernels.rnn.recurrent_layer import LSTM
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.ownership import NO_RULES

NHWC = torch.channels_last
ATEN = torch.ops.aten


def normal(*sizes):
    return (torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))) / 2).bfloat16()


def attention_call(batch=2, length=40, dropout=0.0, mask=None):
    tensors = [normal(batch, 3, length, 16) + i for i in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        return attention._supports(None, *tensors, mask, dropout)


def convolution_call(images=5, channels=16, outputs=24, groups=1, layout=NHWC):
    inputs, weight = normal(images, channels, 9, 9), normal(outputs, channels // groups, 3, 3)
    gradient = normal(images, outputs, 9, 9)
    tensors = [each.contiguous(memory_format=layout) for each in (gradient, inputs, weight)]
    geometry = ([outputs], [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    return convolution._supports(ATEN.convolution_backward, *tensors, *geometry, (True, True, True))


def rounded_convolution_call(images=5, stride=1):
    inputs, weight = normal(images, 16, 9, 9).float(), normal(24, 16, 3, 3).float()
    geometry = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], 1)
    return rounded_convolution._supports(ATEN.convolution, inputs, weight, None, *geometry)._replace(numbers_in=KEPT)


def product_call(rows=40, bias=False, transposed=False, dtype=torch.bfloat16, numbers_in="", last=56, **scales):
    a = normal(48, rows).t() if transposed else normal(rows, 48)
    factors = [each.to(dtype) for each in (a, normal(48, last))]
    added = [torch.ones(last, dtype=dtype)] if bias else []
    kernel = ATEN.addmm if bias else ATEN.mm
    return linear._supports(2, kernel, *added, *factors, **scales)._replace(numbers_in=numbers_in)


def fp32_product_call(**how):
    return product_call(dtype=torch.float32, **how)


def rounding_call(**how):
    return fp32_product_call(numbers_in=ROUNDED, **how)


def lstm_call(steps=20, batch=5, has_biases=True, is_trained=True, products="fp32"):
    weights = [normal(*sizes).float() for sizes in ((64, 6), (64, 16), *[(64,), (64,)] * has_biases)]
    states = [normal(1, batch, 16).float() for _ in range(2)]
    inputs = normal(steps, batch, 6).float().requires_grad_(is_trained)
    call = rnn._supports(LSTM, False, torch.lstm, inputs, states, weights, has_biases, 1, 0.5, True, False, False)
    return call._replace(numbers_in=products)


def loss_call(rows=40, reduction=1, smoothing=0.0):
    target = torch.arange(rows) % 48
    logits = normal(rows, 48).float()
    return cross_entropy._outside_autocast(ATEN.cross_entropy_loss, logits, target, None, reduction, -100, smoothing)


def norm_call(rows=40, width=48, is_affine=True):
    parameters = (normal(width).float(), normal(width).float()) if is_affine else (None, None)
    return norms._supports(
        "layer_norm", ATEN.native_layer_norm, normal(rows, width).float(), [width], *parameters, 1e-5
    )


def fp32_attention_call(batch=2, length=40, is_causal=False, mask=None):
    tensors = (normal(batch, 3, length, 16).float() + i for i in range(3))
    kernel = ATEN._scaled_dot_product_flash_attention_for_cpu
    return flash_attention._forward(kernel, *tensors, is_causal=is_causal, attn_mask=mask)


#: By operator: its calls, torch's computation, other algorithms, and the number of distinct calls.
CASES = {
    "attention": (
        attention_call,
        attention._by_torch,
        [attention.BLOCKS, REFERENCE],
        [
            *({}, {"batch": 1}, {"batch": 5}, {"batch": 8}, {"length": 41}, {"dropout": 0.1}),
            {"mask": torch.ones(40, 40, dtype=torch.bool)},
        ],
        6,
    ),
    "gradients of convolutions": (
        convolution_call,
        override.by_kernel,
        [Plan(weight="fp32").name, Plan("fp32", "fp32").name, REFERENCE],
        [{}, {"images": 8}, {"images": 9}, {"images": 9, "layout": torch.contiguous_format}],
        3,
    ),
    "rounded convolution": (
        rounded_convolution_call,
        override.by_kernel,
        [ROUNDED],
        [{}, {"stride": 2}, {"images": 6}],
        2,
    ),
    "product": (
        product_call,
        linear._by_torch,
        [linear.BLOCKS],
        [{"rows": 33}, {}, {"rows": 64}, {"rows": 65}, {"bias": True}, {"transposed": True}],
        4,
    ),
    "product in fp32": (
        fp32_product_call,
        linear._by_torch,
        [COMPILED],
        [{"rows": 33}, {}, {"rows": 64}, {"rows": 65}, {"bias": True}, {"transposed": True}],
        4,
    ),
    "rounded product": (
        rounding_call,
        linear._by_torch,
        [ROUNDED],
        [{"rows": 33}, {}, {"rows": 65}, {"last": 57}, {"bias": True}, {"transposed": True}],
        5,
    ),
    "lstm": (
        lstm_call,
        rnn._by_torch,
        [COMPILED],
        [
            *({}, {"steps": 21}, {"batch": 9}, {"is_trained": False}, {"has_biases": False}),
            *({"products": "bf16"}, {"products": ROUNDED}),
        ],
        6,
    ),
    "cross-entropy": (
        loss_call,
        override.by_kernel,
        [COMPILED],
        [{"rows": 33}, {}, {"rows": 65}, {"reduction": 2}, {"smoothing": 0.1}],
        3,
    ),
    "layer norm": (
        norm_call,
        override.by_kernel,
        [COMPILED],
        [{"rows": 33}, {}, {"rows": 64}, {"rows": 65}, {"width": 56}, {"is_affine": False}],
        4,
    ),
    "attention in fp32": (
        fp32_attention_call,
        flash_attention._by_torch,
        [COMPILED],
        [{}, {"batch": 1}, {"batch": 5}, {"length": 41}, {"is_causal": True}, {"mask": torch.zeros(40, 40)}],
        6,
    ),
}
EVERY = pytest.mark.parametrize("operator", CASES)


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch):
    for place in (linear, fp32_product, flash_attention):
        monkeypatch.setattr(place, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(attention, "MIN_SCORES", 1)
    monkeypatch.setattr(cross_entropy, "MIN_LOGITS", 1)
    monkeypatch.setattr(norms, "MIN_ELEMENTS", 1)


class Bench:
    """An operator whose algorithms advance a clock by their time."""

    def __init__(self, operator, wrong=(), budget=ALWAYS, choices=None):
        self.make, self.compute, others, self.variants, self.count = CASES[operator]
        self.names, self.wrong, self.calls, self.slow = [TORCH, *others], wrong, [], set()
        self.clock = Clock()
        self.tuner = Tuner(choices or Choices(None), budget, self.clock)
        self.generation = Generation(self.tuner)

    def named(self, name):
        def compute(call):
            self.calls.append(call)
            self.clock.now += 1.0 if name in self.slow else 0.01
            out = self.compute(call)
            if name not in self.wrong:
                return out
            return out * 1.1 if torch.is_tensor(out) else tuple(each * 1.1 for each in out)

        return compute

    def __call__(self, guess, fast=None, possible=None, **how):
        self.slow = {name for name in self.names if name != fast}
        names = possible or self.names
        return self.generation.algorithm(self.make(**how), lambda: {name: self.named(name) for name in names}, guess)


def names_of(operator):
    return [TORCH, *(name for name in CASES[operator][2] if name != REFERENCE)]


@EVERY
def test_the_fastest_algorithm_is_kept_for_this_run_and_later_ones(operator):
    names = names_of(operator)
    for fast in names:
        for guess in names:
            bench = Bench(operator)
            assert {bench(guess, fast) for _ in range(3)} == {fast}
            assert (bench.tuner.measured, bench.tuner.replaced) == (1, int(fast != guess))
            assert Bench(operator, budget=TimeFor(0.0), choices=bench.tuner.choices)(guess) == fast


@EVERY
def test_wrong_algorithm_is_rejected(operator):
    torchs, other, *_ = names_of(operator)
    assert Bench(operator, wrong={other})(other, other) == torchs


@EVERY
def test_shapes_are_measured_apart_and_batches_of_about_the_same_size_together(operator):
    bench = Bench(operator)
    for how in bench.variants:
        bench(bench.names[0], **how)
    assert bench.tuner.measured == bench.count


@EVERY
def test_tensors_that_are_too_large_are_not_measured(operator, monkeypatch):
    torchs, other, *_ = names_of(operator)
    monkeypatch.setattr(override, "MOST_ELEMENTS", 1)
    monkeypatch.setattr(linear, "_MIN_ROWS", 10)
    chosen = Bench(operator)(torchs, other)
    assert chosen == (
        other if operator in ("product", "product in fp32") else torchs
    )  # in which some rows are measured


def test_of_large_products_and_losses_some_rows_and_of_long_sequences_some_steps_are_measured(monkeypatch):
    monkeypatch.setattr(override, "MOST_ELEMENTS", 1 << 12)
    monkeypatch.setattr(linear, "_MIN_ROWS", 1)
    monkeypatch.setattr(rnn, "_TIMED_MULTIPLICATIONS", 1)
    for operator, rows, how in (
        *(("product", (1 << 12) // 56, {"rows": 100}), ("product in fp32", (1 << 12) // 56, {"rows": 100})),
        *(("cross-entropy", (1 << 12) // 48, {"rows": 100}), ("lstm", 16, {"batch": 1})),
    ):
        bench = Bench(operator)
        bench(TORCH, **how)
        assert {len(call.tensors[0]) for call in bench.calls} == {rows}


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
    """Even if another optimizer has stepped in between, which left time for a measurement."""
    monkeypatch.setattr(attention.blocked_attention, "supports", lambda *_: True)
    monkeypatch.setattr(attention.blocked_attention.KERNEL, "unavailable", None)
    monkeypatch.setattr(attention.blocked_attention, "blocked_attention", blocked_attention.by_torch)
    monkeypatch.setattr(Tuner, "choose", lambda self, *_: TORCH if self._budget.left() > 0 else None)
    taken, choose = [], override.choose
    monkeypatch.setattr(override, "choose", lambda *given: taken.append(choose(*given)) or taken[-1])
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
    blocks = attention.BLOCKS  # the default, and then the fastest: forward, forward, and their recomputations
    assert taken == [blocks, TORCH, TORCH, blocks, *[TORCH] * 4]


@pytest.mark.skipif(
    not gives_kernels() or product.KERNEL.unavailable is not None,
    reason=product.KERNEL.unavailable or "it needs torch 2.9",
)
@pytest.mark.parametrize("precision", ["bf16", "bf16-products"])
def test_layers_and_their_gradients_are_measured_in_a_run_without_changing_its_random_numbers(monkeypatch, precision):
    rounding_every_product(monkeypatch)
    monkeypatch.setattr(linear, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(fp32_product, "MIN_MULTIPLICATIONS", 1 << 20)  # for those that do not round
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
    in_words = "bf16" if precision == "bf16" else ROUNDED
    measured = {tuple(key.split()): choice.algorithm for key, choice in tuner.choices.all().items()}
    if any(key[:2] == (ROUNDED, "lstm") and algorithm == TORCH for key, algorithm in measured.items()):
        # The rounded LSTM was not faster, so torch's is measured in fp32 too.
        measured = {key: algorithm for key, algorithm in measured.items() if key[:2] != ("fp32", "lstm")}
    assert {key[0] for key in measured} == {in_words}
    assert {key[2:6:2] for key in measured if key[1] == "product"} == {
        *(("2^7x64", "64x48"), ("2^7x48", "48x40"), ("2^7x40", "40x48"), ("2^7x48", "48x64")),
        *(("40x2^7", "2^7x48"), ("48x2^7", "2^7x64")),
    }
    assert len([key for key in measured if key[1] == "lstm"]) == 1


class Planned:
    """Chooses a plan."""

    def __init__(self, name):
        self.name, self.asked = name, []

    def algorithm(self, call, algorithms, guess):
        self.asked.append(({*algorithms()}, guess))
        return self.name


def test_convolutions_whose_rounded_inputs_are_kept_need_no_margin():
    """So the peak memory does not depend on which of them win by a margin."""
    algorithms = {TORCH: override.by_kernel, ROUNDED: override.by_kernel}
    assert race_of(rounded_convolution_call(), algorithms).pays == 1
    assert race_of(rounding_call(), algorithms).pays > 1
    products = [each for each in (*rounded_convolution.OVERRIDES, *convolution.OVERRIDES) if each.product]
    assert [each.keeps_rounded for each in products] == [True, True]


def test_backward_of_convolutions_takes_the_chosen_plan(monkeypatch):
    call, chooser = convolution_call(groups=8), Planned(Plan("fp32", "fp32").name)
    monkeypatch.setattr(convolution, "rules_now", lambda: NO_RULES._replace(chooser=chooser))
    ours = convolution._by_plans(call)
    ((names, guess),) = chooser.asked
    assert names == {TORCH, "torch/fp32", "fp32/torch", "fp32/fp32", REFERENCE}
    assert guess in names
    for found, expected in zip(ours, override.by_kernel(call), strict=True):
        assert (found - expected).float().norm() < 0.01 * expected.float().norm()
