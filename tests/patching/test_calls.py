"""Layers run around the outermost calls into a model, and around nothing else.

`tests/loops/test_submodules.py` and `test_copies.py` check what calls compute for all ways into a model.
"""

import inspect

import pytest
import torch
from torch import nn

from nano_loop.patching.calls.calls import CallInterceptors
from nano_loop.patching.patch_table import users


class Mixin:
    def my_loss(self, x):
        return self(x).sum()


class Net(Mixin, nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 3)
        self.head = nn.Sequential(nn.Linear(3, 2), nn.ReLU())

    def forward(self, x):
        return self.head(self.encode(x))

    def encode(self, x):
        return self.encoder(x)

    def pieces(self):
        yield self.encoder

    @property
    def width(self):
        return 3

    @staticmethod
    def helper(x):
        return x


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def interceptors():
    interceptors = CallInterceptors()
    yield interceptors
    interceptors.close()


@pytest.fixture
def log():
    return []


@pytest.fixture
def count(interceptors, log):
    """Return a function that adds a layer around a model's calls, which logs its name."""

    def count(model, name="layer", place="layer", interceptors=interceptors):
        def layer(call):
            def counted(function, *args, **kwargs):
                log.append(name)
                return call(function, *args, **kwargs)

            return counted

        interceptors.add(model, place, layer)

    return count


X = torch.ones(1, 3)
#: Ways into a model, and how often they pass through its layer.
WAYS = {
    "call": (lambda net: net(X), 1),
    "forward": (lambda net: net.forward(X), 1),
    "submodule": (lambda net: net.encoder(X), 1),
    "indexed": (lambda net: net.head[0](X), 1),
    "method": (lambda net: net.encode(X), 1),
    "method of a mixin": (lambda net: net.my_loss(X), 1),
    "by keyword": (lambda net: net.__call__(x=X), 1),
    "train": (lambda net: net.train(), 0),
    "property": (lambda net: net.width, 0),
    "state_dict": (lambda net: net.state_dict(), 0),
    "staticmethod": (lambda net: net.helper(X), 0),
    "generator": (lambda net: [*net.pieces()].index(net.encoder), 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_passes_the_layer_once_and_what_computes_nothing_is_none(net, count, log, way):
    enter, times = WAYS[way]
    count(net)
    enter(net)
    assert log == ["layer"] * times


def test_reading_a_parametrized_weight_is_no_call(count, log):
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)))
    count(model)
    assert model[0].weight.shape == (3, 3)
    assert log == []
    model(X)
    assert log == ["layer"]


def test_layers_are_nested_in_the_order_of_their_names_of_which_each_has_one(net, count, log):
    count(net, "outer", "outer")
    count(net, "first", "inner")
    count(net, "inner", "inner")
    net(X)
    assert log == ["outer", "inner"]


def test_close_leaves_the_classes_as_they_were(net, interceptors, count):
    classes = (nn.Module, Net, Mixin, nn.Linear, nn.Sequential)
    before = [dict(vars(owner)) for owner in classes]
    count(net)
    assert "forward" in vars(Net)
    assert vars(Net)["forward"] is not before[1]["forward"]
    interceptors.close()
    assert [dict(vars(owner)) for owner in classes] == before


def test_submodule_set_up_after_its_parent_keeps_one_layer_a_call(net, count, log):
    count(net, "net")
    count(net.encoder, "encoder")
    net(X)
    net.encoder(X)
    assert log == ["net", "encoder"]


def test_function_compiled_during_a_run_forgets_the_layers_with_it(net):
    """torch.compile traces the layers into its graph, so it has to retrace after the run."""

    def doubling(call):
        return lambda function, *args, **kwargs: call(function, *args, **kwargs) * 2

    interceptors = CallInterceptors()
    interceptors.add(net, "layer", doubling)
    compiled = torch.compile(lambda x: net(x), backend="eager")
    during = compiled(X)
    interceptors.close()
    assert torch.equal(during, net(X) * 2)
    assert torch.equal(compiled(X), net(X))
    torch._dynamo.reset()


def _around_all(module):
    return lambda function, module, *args: function(module, *args) * 2


@pytest.mark.parametrize(
    ("keep", "factor"),
    [
        (lambda interceptors, net: interceptors.for_model(net, "another user"), 1),
        (lambda interceptors, net: interceptors.add(net, "layer", lambda call: lambda *args: call(*args) * 2), 2),
        (lambda interceptors, net: interceptors.for_model(net).around_modules(_around_all, "modules"), None),
        (None, 1),
    ],
    ids=["another user", "a layer", "around modules", "nothing"],
)
def test_calls_are_intercepted_until_they_serve_nothing(net, keep, factor):
    interceptors, plain = CallInterceptors(), net(X)
    interceptors.for_model(net, "a user")
    if keep is not None:
        keep(interceptors, net)
    interceptors.release("a user")
    assert users((nn.Module, "__call__")) == (keep is not None)
    assert factor is None or torch.equal(net(X), factor * plain)
    interceptors.add(net, "later", lambda call: lambda *args: -call(*args))
    assert factor is None or torch.equal(net(X), -factor * plain)
    interceptors.close()
    assert not users((nn.Module, "__call__"))
    assert torch.equal(net(X), plain)


def arguments(net):
    return [
        (inspect.getfullargspec(function).args, str(inspect.signature(function)))
        for function in (net.forward, net.encode, net.my_loss, net.encoder.forward, type(net).forward, net.__call__)
    ]


def test_arguments_of_methods_are_those_of_the_originals_to_whoever_asks(net, count):
    """BigDL-Nano's LightningModule uses `getfullargspec`, which does not follow `functools.wraps`."""
    before = arguments(net)
    count(net)
    assert arguments(net) == before
