"""`nano` finds what to set up in a call, passes the call on unchanged, and restores everything."""

import functools
import inspect
import textwrap

import pytest
import torch
from torch import nn
from watched import Net, fit, in_bf16, is_fused, make, seeded  # noqa: F401 - a fixture

import nano_loop
from nano_loop import NanoConfigError, nano

# Warnings about CPUs without bf16 instructions are covered by other tests.
pytestmark = pytest.mark.filterwarnings("ignore:precision=:nano_loop.NanoWarning")
bf16 = nano(precision="bf16", verbose=False)
quiet = nano(verbose=False)


class Penalty(nn.Module):
    """A user-defined loss without parameters, which records the dtype it computes in."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, out, target):
        self.seen.append(torch.mm(out, out.T).dtype)
        return nn.functional.cross_entropy(out, target)


def in_order(model, optimizer, loader):
    return model, optimizer, loader


#: A function that returns the model, the optimizer and the loader passed to it, and how it is called.
CALLS = {
    "in order": (in_order, lambda m, o, d: ((m, o, d), {})),
    "by keyword": (lambda *, net, opt, data: (net, opt, data), lambda m, o, d: ((), {"data": d, "opt": o, "net": m})),
    "some by keyword": (in_order, lambda m, o, d: ((m,), {"loader": d, "optimizer": o})),
    "with defaults": (lambda m, o=None, loader=None, epochs=3: (m, o, loader), lambda m, o, d: ((m, o), {"loader": d})),
    "in *args": (lambda *args: args, lambda m, o, d: ((m, o, d), {})),
    "in **kwargs": (lambda **k: (k["a"], k["b"], k["c"]), lambda m, o, d: ((), {"a": m, "b": o, "c": d})),
    "in lists and dicts": (
        lambda models, rest: (models[0], rest["optimizers"][0], rest["loaders"][0]),
        lambda m, o, d: (([m], {"optimizers": (o,), "loaders": [d]}), {}),
    ),
}


@pytest.mark.parametrize("way", CALLS)
def test_model_optimizer_and_loader_are_found(way):
    function, arguments = CALLS[way]
    parts = make()
    args, kwargs = arguments(*parts)

    @functools.wraps(function)
    def train(*args, **kwargs):
        model, optimizer, loader = function(*args, **kwargs)
        assert all(found is given for found, given in zip((model, optimizer, loader), parts, strict=True))
        assert in_bf16(model) == [True]
        assert is_fused(optimizer)
        return fit(model, optimizer, loader)

    decorated = bf16(train)
    assert decorated(*args, **kwargs) is parts[0]
    assert {"precision", "fused_optimizer", "fast_fetch"} <= {*decorated.report.applied}
    assert decorated.report["fast_fetch"].detail.endswith("1 of 1 loaders")
    assert in_bf16(parts[0]) == [False]
    assert not is_fused(parts[1])


def test_objects_that_are_defaults_are_found():
    net, optimizer, _ = make()

    @bf16
    def train(epochs, model=net, *, opt=optimizer):
        return in_bf16(model), is_fused(opt), epochs

    assert train(3) == ([True], True, 3)


def test_containers_come_as_they_were_given():
    net, optimizer, loader = make()
    models, options = [net], {"optimizer": optimizer}
    models.append(models)  # a list that contains itself

    @bf16
    def train(models, options, loaders):
        assert models is given[0]
        assert options is given[1]
        return in_bf16(models[0])

    given = models, options, (loader,)
    assert train(*given) == [True]


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])), Penalty()],
    ids=["torch's", "weighted", "own"],
)
def test_loss_without_parameters_is_left_alone(loss):
    net, optimizer, loader = make()
    plain = [id(each) for each in loss.buffers()]
    decorated = bf16(fit)
    assert decorated(net, optimizer, loader, loss) is net
    assert set(net.seen) == {torch.bfloat16}
    assert set(getattr(loss, "seen", [])) <= {torch.float32}
    assert [id(each) for each in loss.buffers()] == plain


def test_loss_with_parameters_is_a_model():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature, self.seen = nn.Parameter(torch.ones(())), []

        def forward(self, out, target):
            self.seen.append(torch.mm(out, out.T).dtype)
            return nn.functional.cross_entropy(out * self.temperature, target)

    net, optimizer, loader = make()
    loss = Learned()
    bf16(fit)(net, optimizer, loader, loss)
    assert set(loss.seen) == {torch.bfloat16}


def test_model_without_parameters_is_a_model():
    class Fixed(nn.Module):
        def forward(self, x):
            self.seen = torch.mm(x, x.T).dtype
            return x

    @bf16
    def evaluate(model, loss):
        model(torch.ones(2, 2))
        return model.seen

    assert evaluate(Fixed(), nn.MSELoss()) is torch.bfloat16


def test_frozen_model_is_a_model_and_the_same_one_twice_is_one():
    net, _, _ = make()
    net.requires_grad_(False)
    assert bf16(lambda model, ema: (model is ema, in_bf16(ema)))(net, net) == (True, [True])


@pytest.mark.parametrize("arguments", [(), (1, "two", [3]), (nn.CrossEntropyLoss(),), ([nn.MSELoss(), nn.L1Loss()],)])
def test_call_without_a_model_is_an_error_that_says_so(arguments):
    called = []

    @quiet
    def train(*things):
        called.append(things)

    with pytest.raises(NanoConfigError, match=r"train\(things\) was called without a model: .+\. Pass the model"):
        train(*arguments)
    assert called == []
    assert train.report is None


def test_model_made_inside_is_shown_in_a_torch_nano_that_trains():
    @quiet
    def train(epochs):
        return make()

    with pytest.raises(NanoConfigError, match="without a model") as caught:
        train(3)
    code = textwrap.dedent(str(caught.value).partition("\n\n")[2])
    code = code.replace("...  # the code that builds them, unchanged", "model, optimizer, loader = make()")
    code = code.replace("...  # the loop, unchanged", "seen.append(is_fused(optimizer))").replace(
        "Training()", "Training(verbose=False)"
    )
    names = {"nano_loop": nano_loop, "make": make, "is_fused": is_fused, "seen": [], "args": (3,)}
    exec(code, names)
    assert names["seen"] == [True]


class Trainer:
    """Trains with each kind of method."""

    def __init__(self, net):
        self.net = net

    @bf16
    def by_instance(self, model, optimizer, loader):
        """Train."""
        return self.net is fit(model, optimizer, loader), in_bf16(model)

    @staticmethod
    @bf16
    def by_static(model, optimizer, loader):
        return fit(model, optimizer, loader) is model, in_bf16(model)

    @classmethod
    @bf16
    def by_class(cls, model, optimizer, loader):
        return cls is Trainer and fit(model, optimizer, loader) is model, in_bf16(model)


@pytest.mark.parametrize("name", ["by_instance", "by_static", "by_class"])
def test_methods_are_decorated(name):
    net, optimizer, loader = make()
    assert getattr(Trainer(net), name)(net, optimizer, loader=loader) == (True, [True])


def test_static_method_under_the_decorator_is_decorated():
    owner = type("Owner", (), {"train": bf16(staticmethod(in_bf16))})
    assert owner().train(Net()) == owner.train(Net()) == [True]


def test_decorated_lambda_partial_and_object_train():
    class Loop:
        def __call__(self, model, optimizer, loader):
            return fit(model, optimizer, loader)

    for train in (lambda m, o, d: fit(m, o, d), functools.partial(fit, loss=nn.functional.cross_entropy), Loop()):
        net, optimizer, loader = make()
        assert bf16(train)(net, optimizer, loader) is net
        assert set(net.seen) == {torch.bfloat16}


def test_decorated_partial_and_object_that_hold_what_they_train():
    class Loop:
        def __init__(self, *parts):
            self.parts = parts

        def __call__(self):
            return fit(*self.parts)

    for bind in (
        functools.partial,
        lambda function, *parts: Loop(*parts),
        lambda function, *parts: functools.partial(lambda epochs: fit(*parts), epochs=3),
    ):
        net, *others = make()
        assert bf16(bind(fit, net, *others))() is net
        assert set(net.seen) == {torch.bfloat16}


def test_metadata_is_the_function_s():
    def train(model: nn.Module, epochs: int = 3, *rest, rate: float = 0.1, **more) -> int:
        """Train."""
        return epochs

    train.mark = "mine"
    decorated = quiet(train)
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "mark"):
        assert getattr(decorated, name) == getattr(train, name)
    assert inspect.signature(decorated) == inspect.signature(train)
    assert decorated.__wrapped__ is train
    assert decorated(Net()) == 3


WRONG_CALLS = {
    "too few": ((), {}),
    "too many": ((1, 2, 3, 4), {}),
    "unknown": ((1, 2), {"nothing": 3}),
    "twice": ((1, 2), {"model": 3}),
    "keyword-only in order": ((1, 2, 3), {}),
    "keyword-only missing": ((1, 2), {}),
}


@pytest.mark.parametrize("way", WRONG_CALLS)
def test_wrong_call_is_python_s_own_error(way):
    def train(model, optimizer, *, loader, epochs=1):
        return None

    args, kwargs = WRONG_CALLS[way]
    messages = []
    for function in (train, quiet(train)):
        with pytest.raises(TypeError) as caught:
            function(*args, **kwargs)
        assert type(caught.value) is TypeError
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_another_decorator_below_sees_the_call_as_it_was_made_and_may_add_arguments():
    calls = []

    def noting(function):
        @functools.wraps(function)
        def noted(*args, **kwargs):
            calls.append((len(args), sorted(kwargs)))
            return function(*args, added=5, **kwargs)

        return noted

    @quiet
    @noting
    def train(model, epochs=1, *, rate=0.1, added):
        return epochs, added

    assert train(Net(), epochs=2, rate=1) == (2, 5)
    assert train(model=Net()) == (1, 5)
    assert calls == [(1, ["epochs", "rate"]), (0, ["model"])]


def test_argument_called_like_our_own_names_is_the_function_s():
    @bf16
    def train(self, function, call, options, args=0, kwargs=1):
        return in_bf16(self), function, call, options, args, kwargs

    assert train(self=Net(), function=1, call=2, options=3, args=4) == ([True], 1, 2, 3, 4, 1)


def test_options_are_read_from_the_environment_at_each_call(monkeypatch):
    train = quiet(in_bf16)
    assert train(Net()) == [False]
    monkeypatch.setenv("NANO_LOOP_PRECISION", "bf16")
    assert train(Net()) == [True]
    assert train.report.from_environment == ("NANO_LOOP_PRECISION=bf16",)
    monkeypatch.delenv("NANO_LOOP_PRECISION")
    assert train(Net()) == [False]


class Named(nn.Module):
    """Accepts arguments with names that wrapper functions might use themselves."""

    NAMES = ("function", "call", "module", "modules", "layers", "original", "kind", "entry", "args", "kwargs")

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)

    def forward(self, x, function, call, module, modules, layers, original, kind, entry, args, kwargs):
        return self.layer(x) * (function + call + module + modules + layers + original + kind + entry + args + kwargs)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "channels_last": True}])
def test_arguments_of_a_model_may_have_any_names(options):
    model, given = Named(), dict.fromkeys(Named.NAMES, 0.1)

    @nano(verbose=False, **options)
    def train(model):
        return [model(torch.ones(2, 3, 4, 4), **given) for _ in range(3)]

    expected = model(torch.ones(2, 3, 4, 4), **given)
    for output in train(model):
        torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
