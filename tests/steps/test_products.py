"""Only large products round their inputs, to bf16 or fp16: all visible tensors and small products stay fp32."""

import statistics
import time
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from loops.pairs import rounding_every_product
from loops.rounded import rounded as rounded_by_hand
from torch import nn
from torch.utils.checkpoint import checkpoint

import nano_loop
from nano_loop import TorchNano, nano
from nano_loop.autotune import tuner
from nano_loop.autotune.choices import Choices
from nano_loop.kernels import override
from nano_loop.kernels.linear import product
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.patch_table import users
from nano_loop.policy.product_precision import CONVOLUTION, LSTM, PRODUCT, Policy
from nano_loop.runtime import trial
from nano_loop.runtime.objects.training_objects import TrainingObjects
from nano_loop.steps import products as module

here = pytest.mark.skipif(
    product.KERNEL.unavailable is not None or not gives_kernels(), reason=f"{product.KERNEL.unavailable}, or torch 2.8"
)
on_any_cpu = pytest.mark.skipif(not gives_kernels(), reason="torch 2.8")
either = pytest.mark.parametrize(
    "precision", [pytest.param("bf16-products", marks=here), pytest.param(16, marks=on_any_cpu)]
)


class Attending(nn.Module):
    def __init__(self, is_causal=False, mask=None):
        super().__init__()
        self.project, self.is_causal = nn.Linear(64, 192), is_causal
        self.register_buffer("mask", mask)
        self.attention = nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in self.project(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.is_causal)
        return self.attention(out.transpose(1, 2).flatten(2))


class Batched(nn.Module):
    """Batched products, with added tensors and factors."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 48, 64) / 7), nn.Parameter(torch.randn(8, 1, 64))

    def forward(self, x):
        first = torch.baddbmm(self.bias, x, self.weight, beta=0.5, alpha=2)
        return torch.addmm(first[0], first[1], torch.bmm(first.mT, first)[2], beta=0, alpha=0.1)


class FirstOutput(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def convolutional():
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.Tanh(), nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.ConvTranspose2d(64, 32, 2, stride=2), nn.Conv2d(32, 32, 3, groups=32), nn.Flatten(), nn.LazyLinear(40)),
    )


def perceptron():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 40, bias=False))


IMAGES = {"channels_last": True}
#: The products that round to fp16, if they differ from bf16's: grouped convolutions round, and so do the products over
#: all steps of a recurrence, but not those within it.
IN_FP16 = {"convolutional": {"convolution": 8, "product": 3}, "lstm": {"product": 16}}
#: A model, the shape of its input, options, and the kinds of products that round to bf16.
MODELS = {
    "perceptron": (perceptron, (96, 64), {}, {"product": 6}),
    "compiled": (perceptron, (96, 64), {"compile": True}, {"product": 6}),
    "batches": (Batched, (8, 40, 48), {}, {"product": 9}),
    "convolutional": (convolutional, (8, 3, 16, 16), IMAGES, {"convolution": 6, "product": 3}),
    "sequences": (
        lambda: nn.Sequential(nn.Conv1d(48, 64, 3, stride=2), nn.Tanh(), nn.ConvTranspose1d(64, 32, 2)),
        (8, 48, 33),
        {},
        {"convolution": 4},
    ),
    "attention": (Attending, (3, 40, 64), {}, {"product": 6, "attention": 2}),
    "causal": (lambda: Attending(True), (3, 40, 64), {}, {"product": 6, "attention": 2}),
    "masked": (lambda: Attending(mask=-torch.rand(40, 40)), (3, 40, 64), {}, {"product": 6, "attention": 2}),
    "bool mask": (lambda: Attending(mask=torch.eye(40) < 1), (3, 40, 64), {}, {"product": 6, "attention": 2}),
    "lstm": (lambda: FirstOutput(nn.LSTM(48, 64, 2, bidirectional=True)), (20, 8, 48), {}, {"lstm": 1}),
    "gru": (lambda: FirstOutput(nn.GRU(48, 64)), (9, 32, 48), {}, {"product": 4}),
}


@pytest.fixture
def every_product(monkeypatch):
    rounding_every_product(monkeypatch)


@pytest.fixture
def rounded(monkeypatch):
    """The number of products that have rounded their inputs, by kind."""
    counts, note = Counter(), Policy.note

    def counting(self, kind, *numbers):
        counts[kind] += 1
        note(self, kind, *numbers)

    monkeypatch.setattr(Policy, "note", counting)
    return counts


def built(name):
    torch.manual_seed(0)
    build, shape, *_ = MODELS[name]
    model, x = build(), torch.randn(shape)
    model(x)  # initializes lazy layers
    return model, x


def step(model, x):
    """Return the output and the gradients of the input and all parameters."""
    x = x.clone().requires_grad_()
    out = model(x)
    model.zero_grad()
    out.square().mean().backward()
    return [out.detach(), x.grad, *(each.grad.clone() for each in model.parameters())]


def accelerated(model, x, function=step, **options):
    defaults = {"precision": "bf16-products", "verbose": False, "tune_operators": False}
    train = nano(**{**defaults, **options})(function)
    return train(model, x), train.report


def errors(actual, exact):
    # The gradient of a bias before a norm consists of rounding errors only.
    pairs = [(a.double(), b) for a, b in zip(actual, exact, strict=True) if b.norm() > 1e-9]
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


def rms(values):
    return statistics.fmean(value**2 for value in values) ** 0.5


@either
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "compiled")) for name in MODELS]
)
def test_products_round_their_inputs_and_nothing_else_does(every_product, rounded, name, precision):
    model, x = built(name)
    exact = step(model.double(), x.double())
    model, x = built(name)
    ours, report = accelerated(model, x, **MODELS[name][2], precision=precision)
    assert report["precision"].status == "applied"
    assert rounded == (IN_FP16.get(name, MODELS[name][3]) if precision == 16 else MODELS[name][3])
    assert all(tensor.dtype is torch.float32 for tensor in ours)
    torch._dynamo.reset()
    if precision == 16:  # 11 bits; a gradient differs by more if a ReLU's input changes its sign
        assert 2**-14 < errors(ours, exact)[0] < 2**-10
        assert max(errors(ours, exact)) < 2**-5
        return
    model, x = built(name)
    by_hand, _ = accelerated(model, x, **MODELS[name][2] | {"precision": "bf16", "compile": False})
    assert 1e-4 < rms(errors(ours, exact)) <= 1.2 * rms(errors(by_hand, exact))


@on_any_cpu
def test_product_in_fp16_is_that_of_rounded_inputs_in_fp32(every_product):
    model, x = built("perceptron")
    inputs = x, x * 1e-30, x * 1e30, torch.zeros_like(x), x[:, :1].expand_as(x), x.t().contiguous().t()
    ours, _ = accelerated(model, x, lambda model, x: [model[0](each) for each in inputs], precision=16)
    weight = rounded_by_hand(model[0].weight, torch.float16)
    expected = [torch.addmm(model[0].bias, rounded_by_hand(each, torch.float16), weight.t()) for each in inputs]
    assert all(torch.equal(one, two) for one, two in zip(ours, expected, strict=True))


@on_any_cpu
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_numbers_that_are_not_finite_reach_the_results_in_fp16_as_in_fp32(every_product, value):
    model, x = built("perceptron")
    x[3, 5] = value
    plain = model[0](x)
    (ours,), _ = accelerated(model, x, lambda model, x: [model[0](x)], precision=16)
    assert torch.equal(ours.isnan(), plain.isnan())
    assert torch.equal(ours.isposinf(), plain.isposinf())
    finite = plain.isfinite()
    assert (ours - plain)[finite].norm() < 1e-3 * plain[finite].norm()


@here
def test_outside_of_the_models_and_after_the_run_products_are_torchs_to_the_bit(every_product, rounded):
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    model, _ = built("perceptron")
    other, x = built("attention")
    exact = [torch.mm(a, b), *step(other, x)]

    def uses(model, x):
        return [torch.mm(a, b), *step(other, x)]

    inside, _ = accelerated(model, x, uses)
    assert all(torch.equal(one, two) for one, two in zip(inside, exact, strict=True))
    assert all(torch.equal(one, two) for one, two in zip([torch.mm(a, b), *step(other, x)], exact, strict=True))
    assert not rounded


class Searching(torch.optim.SGD):
    """A third-party optimizer that requires a closure."""

    def step(self, closure):
        return min(super(Searching, self).step(closure) for _ in range(3))


def by_closure(kind, model, x):
    optimizer = kind(model.parameters(), 0.01)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@here
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Searching])
def test_step_that_requires_a_closure_computes_in_fp32_and_what_follows_rounds(every_product, rounded, kind):
    def train(model, x):
        by_closure(kind, model, x)
        assert not rounded
        return step(model, x)

    assert accelerated(*built("perceptron"), train)[1]["precision"].status == "applied"
    assert rounded == {"product": 6}


@here
@pytest.mark.parametrize("kinds", [[torch.optim.LBFGS], [torch.optim.SGD, torch.optim.LBFGS]])
def test_line_searches_of_a_program_without_a_line_are_in_fp32(every_product, rounded, kinds):
    model, x = built("perceptron")
    with nano_loop.accelerated(precision="auto", verbose=False, tune_operators=False) as run:
        for kind in kinds:
            by_closure(kind, model, x)
            assert rounded.pop("product", 0) == (5 if kind is torch.optim.SGD else 0)  # SGD works without a closure
    assert "precision" in run.report.applied


class Careful(nn.Module):
    """Computes some of its products in fp32, with their backward."""

    def __init__(self, is_checkpointed):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.is_checkpointed = is_checkpointed

    @nano_loop.disable_casts()
    def middle(self, x):
        with nano_loop.disable_casts():
            return self.layers[1](x)

    def forward(self, x):
        x = self.layers[0](x)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.is_checkpointed else self.middle(x)
        return self.layers[2](x)


@here
@pytest.mark.filterwarnings("ignore:In CPU autocast")  # from torch's checkpoint inside disable_casts
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_products_without_casts_are_fp32_and_so_is_their_backward(every_product, rounded, is_checkpointed):
    def around(model, x):
        with nano_loop.disable_casts():
            out = model(x)
        out.sum().backward()

    model, x = Careful(is_checkpointed), torch.randn(96, 64)
    accelerated(model, x)
    assert rounded == {"product": 6}
    rounded.clear()
    accelerated(model, x, around)
    assert not rounded


@here
def test_log_of_casts_lists_the_products_of_each_module_and_what_they_pack(every_product):
    def train(model, optimizer, x):
        for _ in range(3):
            step(model, x)
            optimizer.step()

    model, x = built("perceptron")
    train = nano(precision="bf16-products", log_casts=True, verbose=False)(train)
    train(model, torch.optim.SGD(model.parameters(), 0.1), x)
    report = train.report
    rows = {(row.part, row.module): row for row in report["log_casts"].data.rows if row.target == "bf16 in product"}
    assert {place: (row.casts, row.cast_bytes) for place, row in rows.items()} == {
        ("forward", "0"): (1, 6 * (96 * 64 + 64 * 128)),
        ("forward", "2"): (1, 6 * (96 * 128 + 128 * 40)),
        ("backward", "0"): (2, 6 * (2 * 96 * 128 + 96 * 64 + 64 * 128)),
        ("backward", "2"): (2, 6 * (2 * 96 * 40 + 96 * 128 + 128 * 40)),
    }
    assert "6 products round, and pack 0.6 MB" in report["log_casts"].detail


@pytest.mark.parametrize(
    ("asked", "tried", "channels_last", "code"),
    [
        ([], [], False, "too_small"),
        ([CONVOLUTION], [], False, "nchw"),
        ([CONVOLUTION], [], "auto", "untried"),
        ([CONVOLUTION, PRODUCT], [PRODUCT], False, "nchw"),
        ([PRODUCT], [], False, "untried"),
        ([LSTM], [LSTM], False, "not_faster"),
        ([CONVOLUTION, PRODUCT], [CONVOLUTION, PRODUCT], False, "not_faster"),
    ],
)
def test_report_says_why_nothing_has_rounded_by_what_was_tried(step, asked, tried, channels_last, code):
    made = step(module.Products, precision="bf16-products", channels_last=channels_last)
    made._names["Net"] = None
    for kind in asked:
        assert made._policy.may_round(kind, 1 << 40)
    made._policy.tried.update(tried)
    found = made.final_result()
    assert found.code == code
    assert ("channels_last" in found.detail) == (code == "nchw")


@here
def test_small_products_and_models_are_fp32(rounded):
    model, x = built("perceptron")
    exact = step(model, x)
    small, report = accelerated(model, x)
    assert report["precision"].code == "too_small"
    assert all(torch.equal(one, two) for one, two in zip(small, exact, strict=True))
    threads = torch.get_num_threads()
    model, x = nn.Sequential(nn.Linear(64, 1024)), torch.randn(32 * threads, 64)
    exact = step(model, x)
    small, report = accelerated(model, x)
    assert (report["precision"].status, report["precision"].code) == ("measured", "too_small")
    assert "precision" in report.applied
    assert "precision" not in report.skipped
    assert all(torch.equal(one, two) for one, two in zip(small, exact, strict=True))
    assert not rounded
    _, report = accelerated(model, torch.randn(128 * threads, 64))
    assert report["precision"].status == "applied"
    assert rounded == {"product": 3}


@here
def test_odd_calls_are_torchs(every_product, rounded):
    """Calls that torch refuses raise, overlapping memory is copied, and torch computes all but plain matrices."""
    a, b = (torch.randn(64, 64) for _ in range(2))
    calls = [
        lambda: torch.mm(a[:, ::2], b[::2]),
        lambda: torch.mm(a.expand(64, 64)[:1].expand(64, 64), b),
        lambda: torch.mm(a.double(), b.double()),
        lambda: (lambda out: torch.addmm(out, a, b, out=out))(a.clone()),
        lambda: torch.mm(torch.zeros(0, 64), b),
        lambda: torch.mm(a.to_sparse(), b),
        lambda: torch.mm(torch.complex(a, b).conj(), torch.complex(a, b)),
    ]

    class Calling(nn.Linear):
        def forward(self, x):
            results = [call() for call in calls]
            for wrong in (lambda: torch.mm(a, b[:3]), lambda: torch.bmm(a, b), lambda: torch.mm(a, b.double())):
                with pytest.raises(RuntimeError):
                    wrong()
            return results

    results, _ = accelerated(Calling(64, 64), None, lambda model, _: model(None))
    assert all(torch.allclose(one.to_dense(), call().to_dense()) for one, call in zip(results, calls, strict=True))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda patch: patch.setattr(product.KERNEL, "unavailable", "no C compiler was found"), "no_kernel"),
        (lambda patch: patch.setattr("nano_loop.cpu.Machine.has_fast_bf16", False), "no_bf16_instructions"),
        (lambda patch: patch.setattr(module, "gives_kernels", lambda: False), "old_torch"),
    ],
)
def test_where_a_product_cannot_round_the_run_is_fp32_and_says_why(monkeypatch, every_product, change, code):
    monkeypatch.setattr("nano_loop.cpu.Machine.has_fast_bf16", True)
    monkeypatch.setattr(product.KERNEL, "unavailable", None)
    monkeypatch.setattr(module, "gives_kernels", lambda: True)
    change(monkeypatch)
    model, x = built("perceptron")
    exact = step(model, x)
    ours, report = accelerated(model, x)
    assert (report["precision"].status, report["precision"].code) == ("skipped", code)
    assert all(torch.equal(one, two) for one, two in zip(ours, exact, strict=True))


@pytest.mark.parametrize("other", [True, False])
def test_ranks_round_if_all_of_them_can(step, other):
    made = step(module.Products, precision="auto")
    made.ranks = Mock(gather=lambda value: [value, other])
    parts = TrainingObjects([built("perceptron")[0].double()])
    made.observe(parts)
    reason = module.reason_against(made.options, made.machine)
    expected = "not_fp32" if other else "other_ranks"
    assert made.skip_reason(parts).code == (expected if reason is None else reason.code)


def in_force():
    """Return the number of users of the replacements of ``mm`` and of module calls."""
    return users(("mm", "CPU")), users((nn.Module, "__call__"))


def counted(rows, precision):
    """Train on batches of the given number of rows, and return `in_force` after each step."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    used = []

    def train(model, optimizer):
        for _ in range(module.LEARNS_AT + 2):
            model(torch.randn(rows, 256)).square().mean().backward()
            optimizer.step()
            used.append(in_force())

    run = nano(precision=precision, tune_operators=False, fast_linear=False, verbose=False)(train)
    run(model, torch.optim.SGD(model.parameters(), 1e-3))
    return used


@either
@pytest.mark.parametrize(("rows", "stays"), [(8, 0), (1024, 1)])
def test_kernels_and_calls_are_torch_s_again_where_no_product_rounds(rows, stays, precision):
    used = counted(rows, precision)
    assert used == [(1, 1)] * (module.LEARNS_AT - 1) + [(stays, stays)] * 3


@either
def test_kernels_come_back_with_a_model_that_is_set_up_later(precision):
    class Later(TorchNano):
        def train(self):
            used = []
            for rows in (8, 4096):
                model = nn.Linear(256, 256)
                model, optimizer = self.setup(model, torch.optim.SGD(model.parameters(), 1e-3))
                for _ in range(module.LEARNS_AT):
                    self.backward(model(torch.randn(rows, 256)).square().mean())
                    optimizer.step()
                used.append(in_force())
            return used

    options = {"tune_operators": False, "fast_linear": False, "verbose": False}
    assert Later(precision=precision, **options).train() == [(0, 0), (1, 1)]


def trained_by(clock, precision, seconds, models=1):
    """Train with rounded products; return the number of users per step, which sets its time, and the report."""

    class Waiting(TorchNano):
        def train(self):
            parts = []
            for _ in range(models):
                model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
                parts.append(self.setup(model, torch.optim.SGD(model.parameters(), 1e-3)))
            x, used = torch.randn(1024, 256), []
            for _ in range(module.LEARNS_AT + 60):
                used.append(in_force()[0])
                clock.now += seconds(used[-1])
                for model, optimizer in parts:
                    optimizer.zero_grad()
                    self.backward(model(x).square().mean())
                    optimizer.step()
            return used

    run = Waiting(precision=precision, fast_linear=False, verbose=False)
    return run.train(), run.report


@pytest.fixture
def clock(monkeypatch):
    """Round all products, and measure steps without a time limit, on a clock that the loop sets."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(tuner, "SHARE", 100.0)
    monkeypatch.setattr(override, "choose", lambda rules, call, algorithms, guess: guess)
    monkeypatch.setattr(module.Products, "_may_measure", lambda self: True)  # for fp16, too, which any CPU can round
    return made


@either
@pytest.mark.parametrize("models", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_products_are_fp32_where_steps_are_faster_without_rounding(clock, models, precision):
    used, report = trained_by(clock, precision, lambda users: 1.05 if users else 1.0, models)
    assert used[module.LEARNS_AT // models - 1] == 1
    assert used[-5:] == [0] * 5
    last = [result for result in report.results if result.name == "precision"][-1]
    assert (last.status, last.code) == ("measured", "slower")


@either
def test_next_run_starts_in_fp32_unless_its_steps_take_longer(clock, monkeypatch, precision):
    saved = Choices(None)
    monkeypatch.setattr(trial, "choices_for", lambda machine: saved)
    trained_by(clock, precision, lambda users: 1.05 if users else 1.0)
    used, report = trained_by(clock, precision, lambda users: 1.05 if users else 1.0)
    assert used == [1] + [0] * (len(used) - 1)
    last = [result for result in report.results if result.name == "precision"][-1]
    assert (last.status, last.code) == ("measured", "slower")
    used, report = trained_by(clock, precision, lambda users: 2.0 if users else 2.1)  # larger batches
    assert used[:20] == [1] + [0] * 3 + [1] * 16
    assert used[-5:] == [1] * 5
    assert [result.status for result in report.results if result.name == "precision"] == ["applied"]


@either
def test_products_round_where_steps_are_as_slow_in_fp32(clock, precision):
    used, report = trained_by(clock, precision, lambda users: 1.0 if users else 0.98)
    assert used.count(0) == module.ROUNDS
    assert used[-5:] == [1] * 5
    assert [result.status for result in report.results if result.name == "precision"] == ["applied"]
