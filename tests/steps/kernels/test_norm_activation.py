"""Norms with the activation behind them, in runs: as each by itself, whatever reads their outputs."""

import functools
import warnings
import weakref
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nano_loop import NanoError, accelerated
from nano_loop.kernels.norm import pending_output
from nano_loop.patching.torch_private_compiler import has_compiled_code
from nano_loop.steps.kernels import FastNorm, fast_norm
from steps.kernels.cases import use_for_all_sizes

FUSED = "norm_activation_backward"
STEPS = 4
# What torch's forward mode gives, and the construction of these scripts.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def every_size_is_worth_it(monkeypatch):
    use_for_all_sizes(monkeypatch, FastNorm)
    monkeypatch.setattr(pending_output, "has_compiled_code", lambda: False)  # by other tests


class Block(nn.Module):
    """A convolution, a norm, and what reads the norm's output: ``read(block, output, input)``."""

    def __init__(self, read):
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(16, 16, 1, bias=False)  # its bias would have gradients of rounding errors alone
        self.other = nn.BatchNorm2d(16)
        self.kept, self.read = [], read

    def forward(self, x):
        return self.read(self, self.norm(self.conv(x)), x)


def batch(step=0, channels=16):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, channels, 8, 8, generator=generator).contiguous(memory_format=torch.channels_last)


def trained(read, later=None, *, precision="bf16", make=Block, **options):
    """Return outputs, losses and gradients of some steps. In the last, `later` reads the norm's output."""
    torch.manual_seed(0)
    model, stem, found = make(read), nn.Conv2d(16, 16, 1), []
    with accelerated(model, precision=precision, channels_last=True, verbose=False, **options):
        for step in range(STEPS):
            if later is not None and step == STEPS - 1:
                model.read = later
            output = model(stem(batch(step)).to(torch.bfloat16 if precision == "bf16" else torch.float32))
            (output.float() * batch(step + 100)).sum().backward()
            found.append(
                [output.detach().clone(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
            )
            found[-1] += [each.clone() for each in (*model.kept, *model.buffers())]
            model.kept.clear()
            model.zero_grad()
            stem.zero_grad()
    return found


def assert_close(found, expected):
    """Compare results of which some have been rounded to bf16 once or twice more."""
    for mine, others in zip(found, expected, strict=True):
        for one, other in zip(mine, others, strict=True):
            assert type(one) is type(other) is torch.Tensor
            assert one.dtype is other.dtype
            assert (one.double() - other.double()).norm() <= 2**-7 * other.double().norm()


def apart(monkeypatch):
    """Compute each norm and each ReLU by itself."""
    monkeypatch.setattr(fast_norm, "_around", lambda module: None)


def assert_equal(found, expected):
    for step, (mine, others) in enumerate(zip(found, expected, strict=True)):
        for place, (one, other) in enumerate(zip(mine, others, strict=True)):
            assert type(one) is type(other) is torch.Tensor
            assert torch.equal(one, other), (step, place)


def relu(block, y, x):
    return F.relu(y)


def into_y(block, y, x):
    y += x
    return block.relu(y)


def into_sum(block, y, x):
    total = x + y
    return total.relu_()


def of_sum(block, y, x):
    total = torch.add(y, x)
    del y
    return F.relu(total)


def of_sum_of_norms(block, y, x):
    return torch.relu(y + block.other(x))


def held(block, y, x):
    y = torch.relu(y)
    return y * 1


READERS = {
    "function": relu,
    "in place": lambda block, y, x: block.relu(y),
    "of torch": held,
    "method": lambda block, y, x: y.relu(),
    "method in place": lambda block, y, x: y.relu_(),
    "ReLU6": lambda block, y, x: F.relu6(y),
    "module of ReLU6": lambda block, y, x: nn.ReLU6(inplace=True)(y),
    "leaky": lambda block, y, x: F.leaky_relu(y, 0.2),
    "leaky in place": lambda block, y, x: nn.LeakyReLU(0.2, inplace=True)(y),
    "leaky, of a sum": lambda block, y, x: F.leaky_relu(y + x, 0.2),
    "bounded": lambda block, y, x: F.hardtanh(y, 0.0, 0.3, inplace=True),
    "sum in place": into_y,
    "sum": of_sum,
    "sum, then in place": into_sum,
    "sum of two norms": of_sum_of_norms,
}


class Groups(Block):
    """The same with a norm of groups of channels."""

    def __init__(self, read):
        super().__init__(read)
        self.norm, self.other = nn.GroupNorm(4, 16), nn.GroupNorm(2, 16)


@pytest.mark.parametrize("make", [Block, Groups])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_relu_is_computed_in_the_norms_passes_and_to_the_bit_as_alone(called, monkeypatch, read, make):
    found = trained(read, make=make)
    assert called.count(FUSED) == STEPS - 1  # the first shows what reads the output
    apart(monkeypatch)
    called.clear()
    assert_equal(found, trained(read, make=make))
    assert FUSED not in called


SMOOTH = {"SiLU": F.silu, "hardswish": F.hardswish}
SMOOTH_READERS = {
    "function": lambda smooth, block, y, x: smooth(y),
    "in place": lambda smooth, block, y, x: smooth(y, inplace=True),
    "module": lambda smooth, block, y, x: {F.silu: nn.SiLU, F.hardswish: nn.Hardswish}[smooth](inplace=True)(y),
}


@pytest.mark.parametrize("smooth", SMOOTH.values(), ids=SMOOTH)
@pytest.mark.parametrize("read", SMOOTH_READERS.values(), ids=SMOOTH_READERS)
@pytest.mark.parametrize("make", [Block, Groups])
def test_smooth_activation_is_computed_in_the_norms_passes(called, monkeypatch, make, read, smooth):
    read = functools.partial(read, smooth)
    found = trained(read, make=make)
    assert called.count(FUSED) == STEPS - 1
    apart(monkeypatch)
    assert_close(found, trained(read, make=make))


@pytest.mark.parametrize("precision", ["bf16-products", "32"])
def test_fp32_is_computed_so_where_the_layout_makes_torchs_backward_the_same(called, monkeypatch, precision):
    options = {"precision": precision, "make": lambda read: Block(read).float(), "tune_operators": False}
    found = trained(into_y, **options)
    assert called.count(FUSED) == STEPS - 1
    apart(monkeypatch)
    for mine, other in zip(found, trained(into_y, **options), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


class Sequence(nn.Sequential):
    """A chain of torch's modules, whose forward is torch's."""

    def __init__(self, inplace):
        super().__init__(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=inplace))
        self.kept = []


@pytest.mark.parametrize("inplace", [True, False])
def test_chain_of_modules_is_computed_so(called, monkeypatch, inplace):
    found = trained(inplace, make=Sequence)
    assert called.count(FUSED) == STEPS - 1
    apart(monkeypatch)
    assert_equal(found, trained(inplace, make=Sequence))


# --- outputs that something else reads, too ---


class Guided(torch.autograd.Function):
    """Saves its input before anything reads it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.relu(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x > 0) * (gradient > 0)


class Reversal(torch.autograd.Function):
    """Returns its input as it is."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


guided, reversal = Guided.apply, Reversal.apply  # as most scripts do, before a run begins


def scripted_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
    scripted, scripted_module = torch.jit.script(scripted_relu), torch.jit.script(nn.ReLU())


def hooked(block, y, x, relu=F.relu):
    result = relu(y)
    y.register_hook(lambda gradient: block.kept.append(gradient.clone()) or gradient * 2)
    return result


def hooked_after_a_sum(block, y, x):
    total = y + x
    result = F.relu(total)
    for each in (y, total):
        each.register_hook(lambda gradient: block.kept.append(gradient.clone()))
    return result


def kept_gradient(block, y, x):
    result = F.relu(y)
    y.retain_grad()
    result.sum().backward(retain_graph=True)
    block.kept.append(y.grad.clone())
    return result


def asked_for(block, y, x):
    result = F.relu(y)
    block.kept += torch.autograd.grad(result.float().square().sum(), [y, x], retain_graph=True)
    return result


def asked_for_by_backward(block, y, x):
    result = F.relu(y)
    result.float().square().sum().backward(inputs=[y], retain_graph=True)
    block.kept.append(y.grad.clone())
    return result


def without_gradient(block, y, x):
    with torch.no_grad():
        block.kept.append(F.relu(y))
    return F.gelu(y)


def changed(block, y, x):
    first = F.relu(y)
    y.mul_(2)
    return first + y


def penalized(block, y, x, relu=F.relu):
    result = relu(y)
    (gradient,) = torch.autograd.grad(result.float().square().sum(), x, create_graph=True)
    return result + gradient.float().square().mean()


OTHERS = {
    "another function": lambda block, y, x: F.gelu(y),
    "both": lambda block, y, x: F.relu(y) + torch.sigmoid(y),
    "twice in a list": lambda block, y, x: torch.cat([y, y], 1)[:, :16],
    "twice by ReLU": lambda block, y, x: F.relu(y) * torch.relu(y),
    "doubled": lambda block, y, x: F.relu(y + y),
    "tanh of straight lines": lambda block, y, x: F.hardtanh(y),
    "negative slope": lambda block, y, x: F.leaky_relu(y, -0.5),
    "leaky, hooked": lambda block, y, x: hooked(block, y, x, lambda each: F.leaky_relu(each, 0.2)),
    "bounded, hooked": lambda block, y, x: hooked(block, y, x, F.relu6),
    "derivative of a derivative, leaky": lambda block, y, x: penalized(block, y, x, F.leaky_relu),
    "sum with a number": lambda block, y, x: F.relu(y + 1),
    "sum by broadcast": lambda block, y, x: F.relu(y + x.mean((2, 3), keepdim=True)),
    "sum times a number": lambda block, y, x: F.relu(torch.add(y, x, alpha=2)),
    "sum into the other": lambda block, y, x: F.relu(x.clone().add_(y)),
    "sum in another layout": lambda block, y, x: F.relu(y + x.contiguous(memory_format=torch.contiguous_format)),
    "custom function that saves it": lambda block, y, x: guided(y),
    "custom function that returns it": lambda block, y, x: reversal(y) + 0,
    "custom function behind ReLU": lambda block, y, x: F.relu(y) + reversal(y),
    "script": lambda block, y, x: scripted(y),
    "scripted module": lambda block, y, x: scripted_module(y),
    "checkpoint": lambda block, y, x: checkpoint(F.relu, y, use_reentrant=False),
    "older checkpoint": lambda block, y, x: checkpoint(F.relu, y, use_reentrant=True),
    "operator": lambda block, y, x: torch.ops.aten.relu(y),
    "overload": lambda block, y, x: torch.ops.aten.relu.default(y),
    "vmap": lambda block, y, x: torch.vmap(F.relu)(y),
    "transform": lambda block, y, x: torch.func.grad(lambda each: F.relu(each).float().square().sum())(y),
    "transform of a closure": lambda block, y, x: torch.func.grad(lambda each: F.relu(each * y).float().sum())(x),
    "forward mode": lambda block, y, x: torch.func.jvp(F.relu, (y,), (x,))[1],
    "attributes": lambda block, y, x: F.relu(y) if y.shape[0] == 4 and y.dim() == 4 else y,
    "returned": lambda block, y, x: y,
    "view": lambda block, y, x: F.relu(y.flatten(1)).view_as(y),
    "detached": lambda block, y, x: F.relu(y) + y.detach(),
    "hook": hooked,
    "hooks behind a sum": hooked_after_a_sum,
    "gradient kept": kept_gradient,
    "gradient asked for": asked_for,
    "gradient asked for by backward": asked_for_by_backward,
    "ReLU without gradient": without_gradient,
    "changed in place": changed,
    "derivative of a derivative": penalized,
}
OTHER_READERS = pytest.mark.parametrize("read", OTHERS.values(), ids=OTHERS)


@OTHER_READERS
@pytest.mark.parametrize("before", [relu, into_y, of_sum], ids=["after ReLU", "after sum in place", "after sum"])
def test_other_reader_gets_what_the_norm_alone_gives_it(monkeypatch, read, before):
    found = trained(before, read)
    apart(monkeypatch)
    assert_equal(found, trained(before, read))


@OTHER_READERS
def test_other_reader_from_the_first_step_on(monkeypatch, read):
    found = trained(read)
    apart(monkeypatch)
    assert_equal(found, trained(read))


def of_a_sum(smooth, block, y, x):
    return smooth(y + x)


def hooked_and_smooth(smooth, block, y, x):
    return hooked(block, y, x, smooth)


def kept_and_smooth(smooth, block, y, x):
    result = smooth(y)
    y.retain_grad()
    result.sum().backward(retain_graph=True)
    block.kept.append(y.grad.clone())
    return result


def read_twice(smooth, block, y, x):
    return smooth(y) + torch.sigmoid(y)


def penalized_and_smooth(smooth, block, y, x):
    return penalized(block, y, x, smooth)


def computed_again(smooth, block, y, x):
    return checkpoint(smooth, y, use_reentrant=False)


@pytest.mark.parametrize("smooth", SMOOTH.values(), ids=SMOOTH)
@pytest.mark.parametrize("make", [Block, Groups])
@pytest.mark.parametrize(
    "read", [of_a_sum, hooked_and_smooth, kept_and_smooth, read_twice, penalized_and_smooth, computed_again]
)
def test_other_reader_beside_a_smooth_activation_gets_what_the_norm_alone_gives_it(monkeypatch, read, make, smooth):
    before, read = (functools.partial(each, smooth) for each in (SMOOTH_READERS["function"], read))
    found = trained(before, read, make=make), trained(read, make=make)
    apart(monkeypatch)
    for mine, others in zip(found, (trained(before, read, make=make), trained(read, make=make)), strict=True):
        assert_close(mine, others)


def test_input_that_was_changed_before_the_output_is_used_is_an_error_with_advice():
    def change_the_input(block, y, x):
        block.seen.mul_(2)
        return F.gelu(y)

    class Seeing(Block):
        def forward(self, x):
            self.seen = self.conv(x)
            return self.read(self, self.norm(self.seen), x)

    with pytest.raises(NanoError, match=r"was changed in place before its output was used.*pass fast_norm=False"):
        trained(relu, change_the_input, make=Seeing)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch refuses its backward
        trained(relu, change_the_input, make=Seeing, fast_norm=False)


class Doubled(nn.BatchNorm2d):
    """Reads the norm's output before the module returns it."""

    def forward(self, x):
        return super().forward(x) * 2


def with_forward_hook(model):
    model.norm.register_forward_hook(lambda module, args, output: output * 2)


def with_backward_hook(model):
    model.norm.register_full_backward_hook(lambda module, of_inputs, of_outputs: (of_inputs[0] * 2,))


def of_a_subclass(model):
    model.norm = Doubled(16)


def frozen(model):
    model.norm.requires_grad_(False)


def without_weights(model):
    model.norm = nn.BatchNorm2d(16, affine=False)


def by_running_statistics(model):
    model.norm.eval()


@pytest.mark.parametrize(
    ("change", "fused"),
    [
        *((change, 0) for change in (with_forward_hook, with_backward_hook, of_a_subclass, by_running_statistics)),
        *((change, STEPS - 1) for change in (frozen, without_weights)),
    ],
)
def test_module_is_computed_as_alone(called, monkeypatch, change, fused):
    def make(read):
        model = Block(read)
        change(model)
        return model

    found = trained(relu, make=make)
    assert called.count(FUSED) == fused
    apart(monkeypatch)
    assert_equal(found, trained(relu, make=make))


def test_replaced_forward_sees_the_output(called, monkeypatch):
    plain = nn.BatchNorm2d.forward

    @functools.wraps(plain)
    def forward(self, x):
        return plain(self, x) * 2

    monkeypatch.setattr(nn.modules.batchnorm._BatchNorm, "forward", forward)
    found = trained(relu)
    assert FUSED not in called
    apart(monkeypatch)
    assert_equal(found, trained(relu))


class Seen(torch.overrides.TorchFunctionMode):
    """Sees the functions of torch, and their results."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func is F.batch_norm:
            assert result.isfinite().all()
        return result


@pytest.mark.parametrize("mode", [Seen, torch.autograd.graph.save_on_cpu], ids=["functions", "saved tensors"])
def test_modes_that_see_what_is_computed_see_it_as_alone(called, mode):
    model = Block(relu)
    with accelerated(model, precision="bf16", channels_last=True, verbose=False), ExitStack() as stack:
        stack.enter_context(mode())
        for step in range(STEPS):
            model(batch(step).bfloat16()).sum().backward()
    assert "batch_norm" in called
    assert FUSED not in called


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
def test_nothing_is_pending_once_there_is_compiled_code(called, monkeypatch):
    monkeypatch.setattr(pending_output, "has_compiled_code", has_compiled_code)
    compiled = torch.compile(lambda x: F.relu(x) * 2, backend="eager", fullgraph=True)
    try:
        found = trained(lambda block, y, x: compiled(y))
        assert FUSED not in called
        apart(monkeypatch)
        assert_equal(found, trained(lambda block, y, x: compiled(y)))
    finally:
        torch.compiler.reset()


def test_output_is_freed_with_its_input():
    freed = []

    def note(block, y, x):
        freed.append(weakref.ref(y))
        return F.relu(y)

    trained(note)
    assert [reference() for reference in freed] == [None] * STEPS
