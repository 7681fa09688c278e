"""Functions of torch become operators in a traced graph, and compute and draw what they do in the plain loop."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop.compile.graphs import ATTENTION, BATCH_NORM, CROSS_ENTROPY, DROPOUT, RELU
from nano_loop.kernels.attention import blocked_attention
from nano_loop.kernels.attention.attention import attention

from .traced import compiled


def bf16_autocast(function):
    @functools.wraps(function)
    def call(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return function(*args)

    return call


def heads(width=32, heads=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 64, width, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def gradients(function, tensors, seed=5):
    torch.manual_seed(seed)
    out = function(*tensors)
    return [out, *torch.autograd.grad(out.float().square().sum(), tensors), torch.rand(1)]


def near(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def same(function, names, *tensors):
    """Hold a function to what it computes and draws compiled; return the operators that it was compiled to."""
    seen = []
    near(gradients(compiled(function, names, seen), tensors), gradients(function, tensors))
    return seen


def is_torchs(seen):
    return not any("nano_loop" in each for each in seen)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(("causal", "dropout_p"), [(False, 0.0), (True, 0.0), (False, 0.2)])
def test_attention_under_autocast_is_that_of_our_kernels(causal, dropout_p, in_blocks, monkeypatch):
    if not in_blocks:
        monkeypatch.setattr(blocked_attention.KERNEL, "unavailable", "no compiler")
    seen, arguments = [], {"is_causal": causal, "dropout_p": dropout_p}
    traced = compiled(lambda *tensors: F.scaled_dot_product_attention(*tensors, **arguments), [ATTENTION], seen)
    found = gradients(bf16_autocast(traced), heads())
    ours = {"nano_loop.blocked_attention.default", "nano_loop.blocked_attention_backward.default"}
    assert ours & set(seen) == (set() if blocked_attention.KERNEL.unavailable else ours)
    assert found[0].dtype is torch.bfloat16
    near(found, gradients(bf16_autocast(lambda *tensors: attention(*tensors, **arguments)), heads()))
    if not dropout_p:
        plain = gradients(lambda *tensors: F.scaled_dot_product_attention(*tensors, is_causal=causal), heads())
        near(
            found[:4],
            [expected.to(mine.dtype) for mine, expected in zip(found, plain[:4], strict=False)],
            rtol=0.1,
            atol=0.1,
        )


@pytest.mark.parametrize(
    ("tensors", "wrap"),
    [(heads(), lambda call: call), (heads(width=8), bf16_autocast)],
    ids=["without autocast", "narrow heads"],
)
def test_attention_that_we_do_not_compute_is_torchs(tensors, wrap):
    seen = []
    found = gradients(wrap(compiled(F.scaled_dot_product_attention, [ATTENTION], seen)), tensors)
    near(found, gradients(wrap(F.scaled_dot_product_attention), tensors))
    assert is_torchs(seen)


def dropped_twice(x):
    return F.dropout(x, 0.3) + F.dropout(x, 0.3)


def test_dropout_draws_the_masks_of_the_plain_loop():
    seen = same(dropped_twice, [DROPOUT], torch.randn(64, 65, requires_grad=True))
    assert seen.count("nano_loop.kept.default") == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.3, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.dropout(x, 1.0),
        lambda x: F.dropout(x * 1, 0.3, inplace=True),
    ],
    ids=["evaluation", "nothing", "everything", "in place"],
)
def test_dropout_of_other_kinds_is_the_plain_loops(function):
    same(function, [DROPOUT], torch.randn(33, 9, requires_grad=True))


def test_dropout_has_other_masks_at_each_call_and_without_gradients():
    call, x = compiled(lambda x: F.dropout(x, 0.5), [DROPOUT]), torch.ones(1000)
    with torch.no_grad():
        assert not torch.equal(call(x), call(x))


def normed(x, mean, var, weight, bias):
    return F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.3)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_and_its_running_statistics_are_the_plain_loops(layout):
    results = []
    for function in (normed, compiled(normed, [BATCH_NORM])):
        torch.manual_seed(0)
        x = torch.randn(4, 6, 5, 5).contiguous(memory_format=layout).requires_grad_()
        mean, var = torch.randn(6), torch.rand(6)
        weight, bias = (torch.randn(6).requires_grad_() for _ in range(2))
        out = function(x, mean, var, weight, bias)
        results.append([out, mean, var, *torch.autograd.grad(out.square().mean(), (x, weight, bias))])
    near(*results)


def test_batch_norm_in_evaluation_is_torchs():
    layer = nn.BatchNorm2d(6).eval()
    assert is_torchs(same(lambda x: layer(x), [BATCH_NORM], torch.randn(2, 6, 4, 4, requires_grad=True)))


@pytest.mark.parametrize(
    "function",
    [lambda x: F.relu(x), lambda x: torch.relu(x), lambda x: F.relu(x + 1, inplace=True)],
    ids=["F.relu", "torch.relu", "in place"],
)
def test_relu_keeps_bytes_and_is_torchs(function):
    seen = same(function, [RELU], torch.tensor([-2.0, -0.0, 0.0, 1e-30, 3.0], requires_grad=True))
    assert "aten.sign.default" in seen


def test_relu_in_place_changes_what_others_see():
    def call(x):
        y = x * 1
        return F.relu(y, inplace=True) + y

    same(call, [RELU], torch.randn(50, requires_grad=True))


@pytest.mark.parametrize(
    "options",
    [*({"reduction": each} for each in ("none", "mean", "sum")), {"weight": torch.ones(1000) / 2}],
    ids=["none", "mean", "sum", "weights"],
)
def test_cross_entropy_is_our_operator_unless_classes_have_weights(options):
    target = torch.randint(1000, (128,))
    target[:5] = -100
    logits = torch.randn(128, 1000, requires_grad=True)
    seen = same(lambda x: F.cross_entropy(x, target, **options), [CROSS_ENTROPY], logits)
    assert ("nano_loop.cross_entropy_backward.default" in seen) == ("weight" not in options)
    assert is_torchs(seen) == ("weight" in options)


def test_sizes_that_vary_are_compiled_once_more_at_most():
    made = []

    def function(x):
        return F.relu(F.dropout(F.layer_norm(x, x.shape[-1:]), 0.2))

    call = compiled(function, [DROPOUT, RELU], made)
    for size in (8, 5, 3, 7):
        x = torch.randn(size, 40, requires_grad=True)
        near(gradients(call, [x]), gradients(function, [x]))
    assert made.count("nano_loop.kept.default") == 2


def test_a_second_derivative_is_torchs_error():
    x = torch.randn(8, 8, requires_grad=True)
    (first,) = torch.autograd.grad(compiled(dropped_twice, [DROPOUT])(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        first.sum().backward()


def test_gradients_of_torch_func_are_the_plain_loops():
    x = torch.randn(8, 8)
    torch.manual_seed(0)
    expected = torch.func.grad(lambda x: F.relu(x * 2).square().sum())(x)
    function = compiled(lambda x: torch.func.grad(lambda x: F.relu(x * 2).square().sum())(x), [RELU, DROPOUT])
    torch.testing.assert_close(function(x), expected)
