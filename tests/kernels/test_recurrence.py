"""Recurrent layers in C are as exact as torch's, forward and backward, for any size, or are left to torch."""

import contextlib
import copy
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.compared.oracle import rms
from nano_loop import accelerated
from nano_loop.kernels import override
from nano_loop.kernels.linear import product
from nano_loop.kernels.rnn import recurrence, rnn
from nano_loop.kernels.rnn.recurrent_layer import TANH, Arguments, Recurrence
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.ownership import NO_RULES

pytestmark = [
    pytest.mark.skipif(recurrence.KERNEL.unavailable is not None, reason=str(recurrence.KERNEL.unavailable)),
    pytest.mark.skipif(not gives_kernels(), reason="it needs torch 2.9"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:dropout option adds dropout"),
]
KINDS = {
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "GRU": nn.GRU,
    "LSTM": nn.LSTM,
}
EACH = pytest.mark.parametrize("kind", KINDS)
#: Whether products round if requested.
HAS_BF16 = product.KERNEL.unavailable is None


@contextlib.contextmanager
def in_c():
    """Compute all layers in C, as in calls of set-up models."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        rules = NO_RULES._replace(kernels=frozenset((rnn.recurrence.KERNEL.name,)))
        for module in (override, rnn):
            patch.setattr(module, "rules_now", lambda: rules)
        patch.setattr(rnn, "choose", lambda *_: override.COMPILED)
        patch.setattr(rnn, "is_large", lambda *args: True)
        for replaced in rnn.OVERRIDES:
            stack.enter_context(replaced.in_force())
        yield


def layer(kind, size, hidden, *rest, seed=0, **options):
    torch.manual_seed(seed)
    return KINDS[kind](size, hidden, *rest, **options)


def state_of(model, batch, seed=2, by=0.5):
    generator, count = torch.Generator().manual_seed(seed), model.num_layers * (1 + model.bidirectional)
    states = [torch.randn(count, batch, model.hidden_size, generator=generator) * by for _ in range(2)]
    return tuple(states) if isinstance(model, nn.LSTM) else states[0]


def inputs_of(model, steps, batch, lengths=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, steps) if model.batch_first else (steps, batch)
    x = torch.randn(*shape, model.input_size, generator=generator)
    return x if lengths is None else pack_padded_sequence(x, lengths, model.batch_first, enforce_sorted=False)


def tensors_in(value):
    if isinstance(value, PackedSequence):
        return [value.data]
    return [value] if isinstance(value, torch.Tensor) else [tensor for part in value for tensor in tensors_in(part)]


def results(model, x, state=None, dtype=torch.float32, used=None, seed=3):
    """Return the outputs, and the gradients of inputs, states and weights for random gradients of the outputs."""
    model, leaves = copy.deepcopy(model).to(dtype), []

    def leaf(tensor):
        leaves.append(tensor.detach().clone().to(dtype).requires_grad_())
        return leaves[-1]

    x = x._replace(data=leaf(x.data)) if isinstance(x, PackedSequence) else leaf(x)
    if state is not None:
        state = tuple(map(leaf, state)) if isinstance(state, tuple) else leaf(state)
    outputs = tensors_in(model(x, state))
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(output.shape, generator=generator).to(output.dtype) for output in outputs]
    used = range(len(outputs)) if used is None else used
    of_leaves = torch.autograd.grad(
        [outputs[i] for i in used], [*leaves, *model.parameters()], [gradients[i] for i in used], allow_unused=True
    )
    return [*(output.detach() for output in outputs), *(each for each in of_leaves if each is not None)]


def recurrences(called):
    return [name for name in called if name in ("recurrence_forward", "recurrence_backward")]


def error(computed, exact):
    return rms(computed.double() - exact.double())


def assert_right(called, *args, in_bf16=False, **kwargs):
    exact, unit = results(*args, **{**kwargs, "dtype": torch.float64}), 2**-5 if in_bf16 else 1e-6
    with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
        torchs = results(*args, **kwargs)
        with in_c():
            computed = results(*args, **kwargs)
    assert {"recurrence_forward", "recurrence_backward"} <= set(called)
    for ours, other, right in zip(computed, torchs, exact, strict=True):
        assert ours.shape == right.shape
        # With cancellation, either error is random.
        assert error(ours, right) <= max(unit * max(1.0, right.abs().max().item()), 3 * error(other, right))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from([*KINDS]),
    sizes=st.tuples(st.integers(1, 40), st.one_of(st.integers(2, 75), st.just(200))),
    layers=st.integers(1, 3),
    steps=st.integers(1, 9),
    batch=st.integers(1, 33),
    bias=st.booleans(),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    is_packed=st.booleans(),
    has_state=st.booleans(),
    in_bf16=st.booleans() if HAS_BF16 else st.just(False),
    in_steps=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_sizes_are_right(
    called, kind, sizes, layers, steps, batch, is_packed, has_state, in_bf16, in_steps, seed, **options
):
    called.clear()
    with pytest.MonkeyPatch.context() as patch:
        if not in_steps:
            patch.setattr(recurrence, "_FEW_INPUTS", 0)
            patch.setattr(recurrence, "_CACHED", 0)
        model = layer(kind, *sizes, layers, seed=seed, **options)
        lengths = torch.randint(1, steps + 1, (batch,)).tolist() if is_packed else None
        x = inputs_of(model, max(lengths) if is_packed else steps, batch, lengths, seed)
        in_bf16 = in_bf16 and kind != "relu"  # its gradient jumps if rounding moves a sum past 0
        assert_right(called, model, x, state_of(model, batch) if has_state else None, in_bf16=in_bf16)


@EACH
@pytest.mark.parametrize(
    ("hidden", "steps"), [(25, 40), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((64, 50), (200, 20)))]
)
def test_errors_are_not_larger_than_those_of_torch(kind, hidden, steps):
    squares = []
    for seed in range(25 if hidden < 200 else 8):
        model = layer(kind, 30, hidden, seed=seed)
        args = model, inputs_of(model, steps, 16, seed=seed), state_of(model, 16, seed)
        exact, torchs = results(*args, dtype=torch.float64), results(*args)
        with in_c():
            computed = results(*args)
        squares.append([(error(a, c) ** 2, error(b, c) ** 2) for a, b, c in zip(computed, torchs, exact, strict=True)])
    ours, torchs = torch.tensor(squares, dtype=torch.float64).mean(0).sqrt().unbind(1)
    is_large = torch.tensor([tensor.numel() > 1000 for tensor in exact])
    assert (ours <= torchs)[is_large].all()
    assert (ours / torchs).square().mean() <= 1  # the error of a bias is random


@EACH
@pytest.mark.parametrize("in_bf16", [False, True])
def test_the_same_bits_for_any_number_of_threads(for_each_number, kind, in_bf16):
    model, large = layer(kind, 3, 45), layer(kind, 40, 300)  # threads share the units of a large one
    args = [
        (model, inputs_of(model, 30, 13, [30, 30, 21, 21, 21, 20, 11, 9, 9, 8, 3, 2, 1])),
        (model, inputs_of(model, 60, 13)),
        *((large, inputs_of(large, 5, batch)) for batch in (3, 20)),
        (large, inputs_of(large, 5, 7, [5, 5, 4, 3, 3, 2, 1])),
    ]
    for some in args:
        with in_c(), torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            once, *others = for_each_number(lambda some=some: results(*some), 1, 2, 3, 7)
        assert all(torch.equal(a, b) for other in others for a, b in zip(once, other, strict=True))


@EACH
def test_large_and_undefined_numbers_are_those_of_torch(kind):
    model = layer(kind, 9, 20)
    x = inputs_of(model, 5, 6)
    for numbers in (x * 1e4, x * 1e-7):
        exact, torchs = results(model, numbers, dtype=torch.float64), results(model, numbers)
        with in_c():
            computed = results(model, numbers)
        for ours, other, right in zip(computed, torchs, exact, strict=True):
            assert ours.isfinite().all()
            assert error(ours, right) <= 2 * error(other, right) + 1e-7 * right.abs().max()
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[2, 3, 4] = bad
        torchs = model(x)[0]
        with in_c():
            computed = model(x)[0]
        assert torch.equal(computed.isnan(), torchs.isnan())
        assert computed[:, :3].isfinite().all()


@EACH
def test_dropout_between_layers_draws_as_torch_does(called, kind):
    model = layer(kind, 6, 24, 3, dropout=0.4, bidirectional=True)
    for x in (inputs_of(model, 8, 10), inputs_of(model, 8, 10, [8, 8, 7, 5, 5, 3, 2, 2, 1, 1])):
        torch.manual_seed(5)
        torchs, after = results(model, x), torch.rand(3)
        torch.manual_seed(5)
        with in_c():
            computed = results(model, x)
        assert torch.equal(torch.rand(3), after)
        for ours, other in zip(computed, torchs, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-4, atol=2e-5)
    assert called.count("recurrence_forward") == 12
    model.eval()
    exact = tensors_in(copy.deepcopy(model).double()(x._replace(data=x.data.double())))
    with in_c(), torch.no_grad():
        computed = tensors_in(model(x))
    torch.testing.assert_close(computed, exact, check_dtype=False, rtol=1e-5, atol=1e-6)


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def within(context, model, x):
    with context:
        return model(x)[0].clone()


UNKNOWN = {
    "in a mode": lambda model, x: within(Seen(), model, x),
    "in fp16": lambda model, x: within(torch.autocast("cpu", torch.float16), model, x),
    "in inference": lambda model, x: within(torch.inference_mode(), model, x),
    "in fp64": lambda model, x: copy.deepcopy(model).double()(x.double())[0],
    "without sequences": lambda model, x: model(x[:, :0])[0],
    "projected": lambda model, x: layer("LSTM", 6, 18, proj_size=6)(x)[0],
}


@pytest.mark.parametrize("compute", UNKNOWN.values(), ids=UNKNOWN)
def test_what_the_function_in_c_does_not_know_is_torchs(called, compute):
    model = layer("GRU", 6, 18)
    x = inputs_of(model, 5, 4)
    expected = tensors_in(compute(model, x))
    with in_c():
        computed = tensors_in(compute(model, x))
    assert all(map(torch.equal, computed, expected))
    assert not called


@EACH
@pytest.mark.parametrize("by_hand", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lengths", [None, [20] * 30 + [8] * 3], ids=["equal", "packed"])
def test_in_reduced_precision_it_is_as_exact_as_torch_with_its_dtypes(called, kind, by_hand, lengths):
    squares = []
    for seed in range(5):
        model = layer(kind, 40, 48, 2, seed=seed)
        args = model, inputs_of(model, 20, 33, lengths, seed=seed), state_of(model, 33, seed)
        exact = results(*args, dtype=torch.float64)

        def compute(args=args):
            if by_hand:
                return results(*args, dtype=torch.bfloat16)
            with torch.autocast("cpu", torch.bfloat16):
                return results(*args)

        torchs = compute()
        with in_c():
            computed = compute()
        assert [tensor.dtype for tensor in computed] == [tensor.dtype for tensor in torchs]
        squares.append([(error(a, c) ** 2, error(b, c) ** 2) for a, b, c in zip(computed, torchs, exact, strict=True)])
    ours, torchs = torch.tensor(squares, dtype=torch.float64).mean(0).sqrt().unbind(1)
    assert (ours <= 1.1 * torchs).all()
    is_onednns = kind == "LSTM" and lengths is None and not HAS_BF16  # faster than ours without the instructions
    assert called.count("recurrence_backward") == (0 if is_onednns else 10)


@pytest.mark.parametrize(
    ("kind", "units", "steps", "sequences", "is_ours"),
    [
        *((kind, 48, 20, 16, True) for kind in KINDS),
        *((kind, 48, 7, 16, False) for kind in ("tanh", "relu", "GRU")),  # torch's operators are faster with few steps
        ("LSTM", 64, 8, 32, True),
        ("LSTM", 128, 8, 128, True),
        ("LSTM", 200, 8, 128, False),  # oneDNN is faster with large steps
        ("LSTM", 300, 8, 4, False),
    ],
)
def test_layers_in_fp32_are_in_c_where_that_is_faster_before_they_are_measured(
    called, kind, units, steps, sequences, is_ours
):
    model, other = layer(kind, 8, units), layer(kind, 8, units)
    with accelerated(model, precision=32, fast_rnn=True, tune_operators=False, verbose=False) as run:
        assert "fast_rnn" in run.report.applied
        model(inputs_of(model, steps, sequences))[0].sum().backward()
        assert {*recurrences(called)} == ({"recurrence_forward", "recurrence_backward"} if is_ours else set())
        called.clear()
        other(inputs_of(other, 20, 16))[0].sum().backward()
    assert not recurrences(called)


@pytest.mark.slow
def test_fewer_threads_than_asked_for_compute_all_parts():
    """OpenMP may return fewer threads. torch's bf16 products are then wrong, so this is compared through files."""
    code = (
        "import sys, torch\n"
        "from nano_loop.kernels.rnn.recurrence import recurrence\n"
        "from nano_loop.kernels.rnn.recurrent_layer import LSTM, Arguments, Recurrence\n"
        "torch.set_num_threads(int(sys.argv[1])); torch.manual_seed(0)\n"
        "def normal(*sizes): return (torch.randn(sizes) / 8).requires_grad_()\n"
        "for hidden, in_bf16 in ((45, False), (45, True), (300, False), (300, True)):\n"
        "    weights = normal(4 * hidden, 70), normal(4 * hidden, hidden), normal(4 * hidden), normal(4 * hidden)\n"
        "    tensors = Arguments(normal(180, 70), *weights, normal(20, hidden), normal(20, hidden))\n"
        "    layer = Recurrence(LSTM, torch.arange(0, 181, 20), False, False, in_bf16, (torch.float32,) * 2)\n"
        "    outputs = recurrence(layer, tensors)\n"
        "    gradients = torch.autograd.grad(outputs[0].sum(), tensors)\n"
        "    print([tensor.double().sum().item() for tensor in (*outputs, *gradients)])\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code, str(count)],
            env={**os.environ, "OMP_THREAD_LIMIT": str(limit)},
            check=True,
            timeout=120,
            capture_output=True,
        ).stdout
        for count, limit in ((8, 2), (2, 2))
    ]
    assert len(printed[0]) > 100
    assert printed[0] == printed[1]


def tanh_of(x):
    """Return tanh as a layer computes it, whose weights leave its inputs unchanged."""
    rows, width = x.shape
    properties = Recurrence(TANH, torch.tensor([0, rows]), False, False, False, (torch.float32,) * 2)
    weights, state = (torch.eye(width), torch.zeros(width, width), None, None), torch.zeros(rows, width)
    return recurrence.recurrence(properties, Arguments(x, *weights, state, None))[0]


@pytest.mark.parametrize("scale", [0.01, 0.6, 3])
def test_tanh_is_exact_to_one_and_a_half_units_in_the_last_place(scale):
    x = scale * torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    found = tanh_of(x).double()
    exact = x.double().tanh()
    unit = exact.abs().clamp(min=1e-30).log2().floor().sub(23).exp2()
    assert ((found - exact).abs() / unit).max() < 1.5


def test_tanh_of_nan_infinity_and_zero():
    x = torch.tensor([[float("nan")], [float("inf")], [-float("inf")], [-0.0], [30.0], [-30.0]])
    torch.testing.assert_close(tanh_of(x), x.tanh(), rtol=0, atol=0, equal_nan=True)
