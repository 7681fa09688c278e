"""Gradients that are clipped in C are as near to fp64 as torch's; what is unusual is clipped by torch."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.overrides import TorchFunctionMode

from nano_loop import accelerated
from nano_loop.kernels.gradient_clipping import KERNEL
from nano_loop.optimizers.row_steps import RowStep
from nano_loop.patching.operators.operators import gives_kernels
from nano_loop.patching.patch_table import left_by_runs

pytestmark = pytest.mark.skipif(KERNEL.unavailable is not None, reason=str(KERNEL.unavailable))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def model_of(dtype=torch.float32, seed=0):
    """Return a model with gradients: none, small and large ones, and one in another order of memory."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Linear(45, 7), nn.Linear(47, 3001), nn.LayerNorm(3)).to(dtype)
    for parameter in [*model.parameters()][:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    model[0].weight.grad = model[0].weight.grad.to(memory_format=torch.channels_last)
    return model


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def error(results, exact):
    """The rms of what results differ by from those in fp64, relative to their size."""
    pairs = [*zip(results, exact, strict=True)]
    squares = sum((one.double() - other).square().sum() for one, other in pairs)
    return (squares / sum(other.square().sum() for _, other in pairs)).sqrt().item()


def clipped(model, clip, is_plain=False, **options):
    """Clip the gradients of a model, and return the result, the gradients, and how often C was called."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = KERNEL.calls
    if is_plain:
        result = clip(model)
    else:
        with accelerated(model, optimizer, verbose=False, **options):
            result = clip(model)
    assert left_by_runs() == {}
    return result, gradients(model), KERNEL.calls - calls


@DTYPES
@pytest.mark.parametrize("most", [1e-3, 7, 1e9, math.inf, -2.0])
def test_norms_are_as_near_to_fp64_as_torchs(dtype, most):
    def clip(model):
        return clip_grad_norm_((parameter for parameter in model.parameters()), most)

    norm, scaled, calls = clipped(model_of(dtype), clip)
    plain_norm, plain, none = clipped(model_of(dtype), clip, is_plain=True)
    exact_norm, exact, _ = clipped(model_of(dtype).double(), clip, is_plain=True)
    assert (calls, none) == (1, 0)
    assert (norm.dtype, norm.shape, norm.requires_grad) == (plain_norm.dtype, (), False)
    assert error([norm], [exact_norm]) <= error([plain_norm], [exact_norm]) + 1e-7
    assert error(scaled, exact) <= error(plain, exact) + 1e-7
    assert [one.stride() for one in scaled] == [one.stride() for one in plain]
    if most > 1e3:
        assert all(map(torch.equal, scaled, gradients(model_of(dtype))))


def test_sums_do_not_depend_on_threads():
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        model = model_of()
        with accelerated(model, torch.optim.SGD(model.parameters()), verbose=False):
            torch.set_num_threads(threads)
            results.append([clip_grad_norm_(model.parameters(), 1e-3), *gradients(model)])
    torch.set_num_threads(before)
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


@DTYPES
@pytest.mark.parametrize("most", [0.3, 0, 1e30, -0.7])
def test_values_are_torchs_bits(dtype, most):
    def clip(model):
        model[1].bias.grad[3] = math.nan
        return clip_grad_value_(model.parameters(), most)

    result, limited, calls = clipped(model_of(dtype), clip)
    _, plain, _ = clipped(model_of(dtype), clip, is_plain=True)
    assert (result, calls) == (None, 1)
    for one, other in zip(limited, plain, strict=True):
        assert torch.equal(one.nan_to_num(5), other.nan_to_num(5))


def test_one_tensor_and_the_same_tensor_twice_are_clipped_as_by_torch():
    for select in (lambda model: model[1].weight, lambda model: [model[1].weight, model[1].bias, model[1].weight]):
        norm, scaled, calls = clipped(model_of(), lambda model, of=select: clip_grad_norm_(of(model), 0.5))
        plain_norm, plain, _ = clipped(model_of(), lambda model, of=select: clip_grad_norm_(of(model), 0.5), True)
        assert calls == 1
        torch.testing.assert_close([norm, *scaled], [plain_norm, *plain])


class Mode(TorchFunctionMode):
    """It sees what torch computes."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


def with_gradient(change):
    def clip(model):
        model[1].weight.grad = change(model[1].weight.grad)
        return clip_grad_norm_(model.parameters(), 0.5)

    return clip


def in_mode(model):
    with Mode():
        return clip_grad_norm_(model.parameters(), 0.5)


def in_profiler(model):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        norm = clip_grad_norm_(model.parameters(), 0.5)
    assert any("_foreach_norm" in event.key for event in profile.key_averages())
    return norm


def with_another_parameter(model):
    model[1].weight = nn.Parameter(Own(model[1].weight.detach()))
    model[1].weight.grad = torch.ones_like(model[1].weight.detach())
    return clip_grad_norm_(model.parameters(), 0.5)


LEFT_TO_TORCH = {
    "sum of sizes": lambda model: clip_grad_norm_(model.parameters(), 0.5, norm_type=1),
    "largest": lambda model: clip_grad_norm_(model.parameters(), 0.5, "inf"),
    "no lists": lambda model: clip_grad_norm_(model.parameters(), 0.5, foreach=False),
    "no lists of values": lambda model: clip_grad_value_(model.parameters(), 0.5, foreach=False),
    "an infinite limit": lambda model: clip_grad_value_(model.parameters(), math.inf),
    "a tensor": lambda model: clip_grad_norm_(model.parameters(), torch.tensor(0.5)),
    "NaN": lambda model: clip_grad_norm_(model.parameters(), math.nan),
    "none": lambda model: clip_grad_norm_(model[3].bias, 0.5),
    "with gaps": with_gradient(lambda gradient: gradient.repeat(1, 2)[:, ::2]),
    "small values": lambda model: clip_grad_value_(model[1].parameters(), 0.5),
    "a subclass": with_gradient(Own),
    "a subclass as parameter": with_another_parameter,
    "mode": in_mode,
    "profiler": in_profiler,
}


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_unusual_calls_are_torchs(name):
    clip = LEFT_TO_TORCH[name]
    result, scaled, calls = clipped(model_of(), clip)
    plain_result, plain, _ = clipped(model_of(), clip, is_plain=True)
    assert calls == 0
    torch.testing.assert_close([result], [plain_result], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scaled, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, lambda gradient: gradient[:1].expand(gradient.shape)])
def test_errors_are_torchs(change):
    for is_plain in (False, True):
        with pytest.raises(RuntimeError, match=r"SparseCPU|more than one element"):
            clipped(model_of(), with_gradient(change), is_plain)


def test_mixed_dtypes_and_fp64_are_torchs():
    for change in (lambda model: model.double(), lambda model: model[1].to(torch.bfloat16)):
        model = model_of()
        change(model)
        assert clipped(model, lambda model: clip_grad_norm_(model.parameters(), 0.5))[2] == 0


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30])
def test_norms_that_are_not_finite_are_torchs(value):
    def clip(model):
        model[1].bias.grad[0] = value
        with pytest.raises(RuntimeError, match="is non-finite"):
            clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
        return clip_grad_norm_(model.parameters(), 0.5)

    norm, scaled, _ = clipped(model_of(), clip)
    plain_norm, plain, _ = clipped(model_of(), clip, is_plain=True)
    torch.testing.assert_close([norm, *scaled], [plain_norm, *plain], rtol=0, atol=0, equal_nan=True)


def test_gradients_of_other_models_are_torchs_and_so_are_all_after_the_run():
    inside = [clip_grad_norm_.__closure__[0].cell_contents, clip_grad_value_.__closure__[0].cell_contents]
    model, other, twin = model_of(), model_of(seed=1), model_of(seed=1)
    expected = clip_grad_norm_(twin.parameters(), 0.5)
    calls = KERNEL.calls
    first, second = (accelerated(model, torch.optim.SGD(model.parameters()), verbose=False) for _ in range(2))
    with first:
        with second:
            assert torch.equal(clip_grad_norm_(other.parameters(), 0.5), expected)
        assert KERNEL.calls == calls
        clip_grad_norm_(model.parameters(), 0.5)
        assert KERNEL.calls == calls + 1
    clip_grad_norm_(model.parameters(), 0.5)
    assert KERNEL.calls == calls + 1
    assert all(map(torch.equal, gradients(other), gradients(twin)))
    assert inside == [clip_grad_norm_.__closure__[0].cell_contents, clip_grad_value_.__closure__[0].cell_contents]


@pytest.mark.parametrize("options", [{"exact": True}, {"fused_optimizer": False}], ids=str)
def test_options_that_leave_optimizers_to_torch_leave_clipping_to_it(options):
    assert clipped(model_of(), lambda model: clip_grad_norm_(model.parameters(), 0.5), **options)[2] == 0


def test_generator_without_parameters_warns():
    model = model_of()
    with (
        accelerated(model, torch.optim.SGD(model.parameters()), verbose=False),
        pytest.warns(UserWarning, match="empty generator"),
    ):
        clip_grad_norm_((parameter for parameter in ()), 0.5)


def test_autograd_knows_that_gradients_were_changed():
    model = nn.Linear(3, 1 << 16)
    with accelerated(model, torch.optim.SGD(model.parameters()), verbose=False):
        for clip in (
            lambda: clip_grad_norm_(model.parameters(), 0.5),
            lambda: clip_grad_value_(model.parameters(), 0.5),
        ):
            loss = model(torch.ones(4, 3)).square().sum()
            model.weight.grad, model.bias.grad = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
            loss = model.weight.grad.square().sum()
            calls = KERNEL.calls
            clip()
            assert KERNEL.calls == calls + 1
            with pytest.raises(RuntimeError, match="inplace operation"):
                loss.backward()


def test_compiled_loop_clips_as_torch():
    torch.compiler.reset()
    model, twin = model_of(), model_of()
    expected = clip_grad_norm_(twin.parameters(), 0.5)
    with accelerated(model, torch.optim.SGD(model.parameters()), verbose=False):
        compiled = torch.compile(lambda: clip_grad_norm_([*model.parameters()], 0.5), backend="eager")
        assert torch.equal(compiled(), expected)
    torch.compiler.reset()
    assert all(map(torch.equal, gradients(model), gradients(twin)))


@pytest.mark.skipif(not gives_kernels(), reason="gradients of rows need torch 2.9")
@pytest.mark.parametrize(
    ("clip", "is_by_rows"),
    [
        (lambda p: clip_grad_norm_(p, 1e-2), True),
        (lambda p: clip_grad_norm_(p, 1e9), True),
        (lambda p: clip_grad_value_(p, 1e-3), True),
        (lambda p: clip_grad_value_(p, -1e-3), False),  # which changes zeros
        (lambda p: clip_grad_norm_(p, 1e-2, foreach=False), False),
    ],
)
def test_tables_are_clipped_by_rows_and_then_stepped_by_rows(clip, is_by_rows, monkeypatch):
    taken, original = [], RowStep.__call__
    monkeypatch.setattr(RowStep, "__call__", lambda self: (taken.append(self), original(self)))

    def trained(**options):
        torch.manual_seed(0)
        model = nn.Embedding(4096, 64)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with accelerated(model, optimizer, verbose=False, **options):
            for number in range(5):
                optimizer.zero_grad()
                model(torch.arange(number, number + 9)).square().sum().backward()
                clip(model.parameters())
                optimizer.step()
            return model.weight.detach(), model.weight.grad

    assert all(map(torch.equal, trained(), trained(fast_embedding=False)))
    of_model = [step for step in taken if step.rows.shape == (4096, 64)]  # and not of the comparison with torch
    assert len(of_model) == 4 * is_by_rows  # the first step, which makes the state, is torch's


@pytest.mark.skipif(not gives_kernels(), reason="gradients of rows need torch 2.9")
def test_tables_beside_gradients_of_another_dtype_are_torchs():
    def clip(model):
        model[0](torch.arange(9)).square().sum().backward()
        model[1].weight.grad = torch.ones_like(model[1].weight)
        return clip_grad_norm_(model.parameters(), 0.5)

    def model():
        torch.manual_seed(0)
        return nn.ModuleList([nn.Embedding(4096, 64), nn.Linear(64, 3, bias=False).to(torch.bfloat16)])

    (norm, scaled, calls), (plain_norm, plain, _) = clipped(model(), clip), clipped(model(), clip, is_plain=True)
    assert calls == 0
    assert all(map(torch.equal, [norm, *scaled], [plain_norm, *plain]))
