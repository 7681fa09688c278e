"""A norm in a run returns what torch's returns, and takes what module, class and function are at each call."""

import contextlib
import copy
import functools
import threading
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nano_loop import accelerated
from nano_loop.kernels import override
from nano_loop.kernels.norm import rms_norm
from steps.kernels.cases import BY_NAME, use_for_all_sizes


@pytest.fixture(autouse=True)
def every_norm_is_in_c(monkeypatch):
    use_for_all_sizes(monkeypatch, BY_NAME["fast_norm"])
    monkeypatch.setattr(rms_norm, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(override, "_default_in_fp32", lambda: override.COMPILED)


CLOSE = {"rtol": 1e-3, "atol": 1e-4}
KINDS = {
    "batch": (lambda: nn.BatchNorm2d(16), "batch_norm"),
    "group": (lambda: nn.GroupNorm(4, 16), "group_norm_backward"),
    "instance": (lambda: nn.InstanceNorm2d(16, affine=True), "batch_norm"),
    "layer": (lambda: nn.LayerNorm(16), "layer_norm"),
    "RMS": (lambda: nn.RMSNorm(16, eps=1e-5), "layer_norm"),
}
NORM_KINDS = pytest.mark.parametrize("kind", KINDS)


with warnings.catch_warnings(action="ignore", category=DeprecationWarning):

    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Block(nn.Module):
    """A convolution, a norm and a ReLU. `read` takes the norm's output and input, and returns what it has read."""

    def __init__(self, kind):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(16, 16, 1, bias=False), KINDS[kind][0](), nn.ReLU()
        self.is_of_rows, self.read, self.found = kind in ("layer", "RMS"), None, []

    def forward(self, x):
        x = self.conv(x)
        x = x.permute(0, 2, 3, 1) if self.is_of_rows else x
        y = self.norm(x)
        assert type(y) is torch.Tensor
        y.attribute = 2
        out = self.relu(y)
        if self.read is not None:
            self.found.append(self.read(y, x))
        return out * y.attribute


def steps_of(kind, options, change=None, read=None):
    """Return what a loop of five steps sees, in a run if there are options. `change` takes the block in the third."""
    torch.manual_seed(0)
    model, seen = Block(kind), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 16, 12, 12).contiguous(memory_format=torch.channels_last)
    run = accelerated(model, optimizer, verbose=False, tune_operators=False, **options) if options else None
    with run or contextlib.nullcontext():
        for step in range(5):
            if step == 2 and change is not None:
                change(model)
            model.read = read if step > 2 else None
            optimizer.zero_grad()
            output = model(x)
            output.square().mean().backward()
            optimizer.step()
            seen += [
                output.detach().clone(),
                *(each.grad.clone() for each in model.parameters() if each.grad is not None),
            ]
        seen += model.found
        return seen + [each.detach().clone() for each in model.state_dict().values()]


def assert_as_torch(kind, called=None, precision=32, **named):
    found = steps_of(kind, {"precision": precision}, **named)
    assert called is None or KINDS[kind][1] in called
    for mine, plain in zip(found, steps_of(kind, None, **named), strict=True):
        torch.testing.assert_close(mine, plain, **CLOSE)


def in_thread(read):
    def call(y, x):
        results = []
        thread = threading.Thread(target=lambda: results.append(read(y, x)))
        thread.start()
        thread.join()
        return results[0]

    return call


def assigned(y, x):
    buffer = torch.empty_like(x)
    buffer.data = y
    return buffer.clone()


#: What reads a tensor in C++, without a call of the class that it has.
READS = {
    "tensor": lambda y, x: torch.tensor(y),
    "as_tensor": lambda y, x: torch.as_tensor(y, dtype=torch.float64),
    "asarray": lambda y, x: torch.asarray(y, copy=True),
    "new_tensor": lambda y, x: x.new_tensor(y),
    "Tensor": lambda y, x: torch.Tensor(y).clone(),
    "as_subclass": lambda y, x: y.as_subclass(torch.Tensor).clone(),
    "data": assigned,
    "dlpack": lambda y, x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(y)).clone(),
    "capsule": lambda y, x: torch.from_dlpack(y.detach().__dlpack__()).clone(),
    "nested": lambda y, x: torch.nested.nested_tensor([y]).to_padded_tensor(0.0),
    "sparse": lambda y, x: torch.sparse_coo_tensor(torch.arange(4)[None], y, y.shape).to_dense(),
    "functionalize": lambda y, x: torch.func.functionalize(lambda a: a * 2)(y),
    "gradient in a thread": in_thread(lambda y, x: torch.func.grad(lambda a: a.square().sum())(y)),
    "vmap in a thread": in_thread(lambda y, x: torch.vmap(torch.sigmoid)(y)),
    "scripted in a thread": in_thread(lambda y, x: scripted(y)),
    "numpy": lambda y, x: torch.from_numpy(y.detach().numpy().copy()),
    "gradient of it": lambda y, x: torch.autograd.grad(y.relu().square().sum(), y, retain_graph=True)[0],
    "gradient of the input": lambda y, x: torch.autograd.grad(y.relu().square().sum(), x, retain_graph=True)[0],
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of what reads them
@NORM_KINDS
def test_whatever_reads_an_output_finds_it_written(called, kind):
    found = []

    def read_all(y, x):
        found.append({name: read(y, x).detach() for name, read in READS.items()})
        return y.detach().clone()

    assert_as_torch(kind, called, read=read_all)
    steps = len(found) // 2
    for mine, plain in zip(found[:steps], found[steps:], strict=True):
        for name, value in mine.items():
            torch.testing.assert_close(value, plain[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@NORM_KINDS
def test_output_that_is_kept_past_the_step_is_that_of_the_forward(kind):
    kept = []

    def noted(y, x):
        kept.append((y, y.detach().clone(), y._version))
        return y.detach().clone()

    assert_as_torch(kind, read=noted)
    assert all(torch.equal(y, then) and y._version == version for y, then, version in kept)


@NORM_KINDS
def test_hooks_and_kept_gradients_of_outputs_are_called_once(kind):
    def counts(**options):
        seen = []

        def hooked(y, x):
            y.register_hook(lambda gradient: seen.append(gradient.clone()))
            y.retain_grad()
            seen.append(y)
            return y.detach().clone()

        steps_of(kind, options, read=hooked)
        return [each.grad if each.requires_grad else each for each in seen]

    found, plain = counts(precision=32), counts()
    assert len(found) == len(plain) == 4
    for mine, other in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


WRAPPED = [
    ("batch", F, "batch_norm"),
    ("batch", torch, "batch_norm"),
    ("group", F, "group_norm"),
    ("group", torch, "group_norm"),
    ("instance", F, "instance_norm"),
    ("layer", F, "layer_norm"),
    ("layer", torch, "layer_norm"),
    ("RMS", F, "rms_norm"),
    ("RMS", torch, "rms_norm"),
    ("batch", F, "relu"),
    ("group", F, "relu"),
    ("batch", torch, "relu"),
    ("batch", nn.BatchNorm2d, "forward"),
    ("batch", nn.modules.batchnorm._BatchNorm, "forward"),
    ("group", nn.GroupNorm, "forward"),
    ("layer", nn.LayerNorm, "forward"),
    ("RMS", nn.RMSNorm, "forward"),
]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of torch's RMS norm, in bf16
@pytest.mark.parametrize("precision", [32, pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "in the run"])
@pytest.mark.parametrize(("kind", "owner", "name"), WRAPPED, ids=lambda value: getattr(value, "__name__", None))
def test_wrapped_function_has_its_effect_once(monkeypatch, kind, owner, name, is_late, precision):
    original = getattr(owner, name)
    sizes = []

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        out = original(*args, **kwargs)
        sizes.append(out.detach().abs().max().item())
        return out * 0.5

    def losses(**options):
        sizes.clear()
        with pytest.MonkeyPatch.context() as patch:
            wrap = functools.partial(patch.setattr, owner, name, wrapper)
            if not is_late:
                wrap()
            seen = steps_of(kind, options, change=(lambda model: wrap()) if is_late else None)
            return [torch.tensor(sizes), *(each.float() for each in seen[: 5 * 2])]

    expected = losses()
    bounds = CLOSE if precision == 32 else {"rtol": 0.05, "atol": 0.05}
    for mine, plain in zip(losses(precision=precision), expected, strict=True):
        torch.testing.assert_close(mine, plain, **bounds)


def without_statistics(model):
    model.norm.track_running_stats = False
    model.norm.running_mean = model.norm.running_var = None


def in_another_class(model):
    class Doubled(type(model.norm)):
        def forward(self, x):
            return super().forward(x) * 2

    model.norm.__class__ = Doubled


def in_a_class_of_the_users(model):
    class Plus(nn.Module):
        def forward(self, x):
            return x.relu() + self.weight.sum()

    model.norm.__class__ = Plus


def with_forward_of_its_own(model):
    model.norm.forward = lambda x: type(model.norm).forward(model.norm, x) - 1


def with_weights_of_others(model):
    model.norm.weight = nn.Parameter(torch.full_like(model.norm.weight, 3.0))


def without_bias(model):
    model.norm.bias = None


def with_hook(model):
    model.norm.register_forward_hook(lambda module, args, out: out * 3)


CHANGES = {
    "eps": lambda model: setattr(model.norm, "eps", 0.5),
    "weights": with_weights_of_others,
    "data of weights": lambda model: setattr(model.norm.weight, "data", model.norm.weight.data * 2),
    "class": in_another_class,
    "class of the user's": in_a_class_of_the_users,
    "forward": with_forward_of_its_own,
    "bound forward": lambda model: setattr(model.norm, "forward", types.MethodType(lambda self, x: x * 2, model.norm)),
    "hook": with_hook,
    "frozen": lambda model: model.norm.requires_grad_(False),
    "evaluation": lambda model: model.eval(),
    "replaced": lambda model: setattr(model, "norm", copy.deepcopy(model.norm).requires_grad_(False)),
}
OF_BATCHES = {
    "momentum": lambda model: setattr(model.norm, "momentum", 0.9),
    "cumulative": lambda model: setattr(model.norm, "momentum", None),
    "no statistics": without_statistics,
    "reset": lambda model: model.norm.reset_running_stats(),
}
EACH_CHANGE = [
    *((kind, name) for kind in KINDS for name in CHANGES),
    *(("batch", name) for name in OF_BATCHES),
    *((kind, "bias") for kind in ("batch", "group", "layer")),
    ("group", "groups"),
]


@pytest.mark.parametrize(("kind", "change"), EACH_CHANGE)
def test_change_between_steps_is_seen_at_the_next_call(called, kind, change):
    changes = (
        CHANGES | OF_BATCHES | {"bias": without_bias, "groups": lambda model: setattr(model.norm, "num_groups", 2)}
    )
    assert_as_torch(kind, called, change=changes[change])
