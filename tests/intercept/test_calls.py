"""Layers run around the outermost calls into a model, and around nothing else."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from nano_loop.patching.calls.calls import CallInterceptors


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


def counting(log, name="layer"):
    def layer(call):
        def counted(function, *args, **kwargs):
            log.append(name)
            return call(function, *args, **kwargs)

        return counted

    return layer


X = torch.ones(1, 3)


@pytest.mark.parametrize(
    "enter",
    [
        lambda net: net(X),
        lambda net: net.forward(X),
        lambda net: net.encoder(X),
        lambda net: net.head[0](X),
        lambda net: net.encode(X),
        lambda net: net.my_loss(X),
        lambda net: net.__call__(x=X),
    ],
    ids=["call", "forward", "submodule", "indexed", "method", "method of a mixin", "by keyword"],
)
def test_every_way_in_passes_the_layer_once(net, interceptors, enter):
    log = []
    interceptors.add(net, "layer", counting(log))
    enter(net)
    assert log == ["layer"]


@pytest.mark.parametrize(
    "touch",
    [lambda net: net.train(), lambda net: net.width, lambda net: net.state_dict(), lambda net: net.helper(X)],
    ids=["train", "property", "state_dict", "staticmethod"],
)
def test_what_computes_nothing_is_no_way_in(net, interceptors, touch):
    log = []
    interceptors.add(net, "layer", counting(log))
    touch(net)
    assert log == []


def test_reading_a_parametrized_weight_is_no_call(interceptors):
    log, model = [], nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)))
    interceptors.add(model, "layer", counting(log))
    assert model[0].weight.shape == (3, 3)
    assert log == []
    model(X)
    assert log == ["layer"]


def test_generator_method_is_left_alone(net, interceptors):
    log = []
    interceptors.add(net, "layer", counting(log))
    assert list(net.pieces()) == [net.encoder]
    assert log == []


def test_other_models_of_the_same_class_are_not_touched(net, interceptors):
    log = []
    interceptors.add(net, "layer", counting(log))
    Net()(X)
    nn.Linear(3, 1)(X)
    assert log == []


def test_layers_are_nested_in_the_order_in_which_they_were_added(net, interceptors):
    log = []
    interceptors.add(net, "outer", counting(log, "outer"))
    interceptors.add(net, "inner", counting(log, "inner"))
    net(X)
    assert log == ["outer", "inner"]


def test_layer_of_a_name_takes_the_place_of_the_one_before(net, interceptors):
    log = []
    interceptors.add(net, "layer", counting(log, "first"))
    interceptors.add(net, "layer", counting(log, "second"))
    net(X)
    assert log == ["second"]


def test_next_call_is_outermost_again_after_an_exception(net, interceptors):
    log = []
    interceptors.add(net, "layer", counting(log))
    with pytest.raises(RuntimeError):
        net(torch.ones(1, 99))
    net(X)
    assert log == ["layer", "layer"]


def test_each_thread_has_its_own_outermost_call(net, interceptors):
    log, inside, go_on = [], threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            inside.set()
            assert go_on.wait(10)
            return x

    waiting = Waits()
    interceptors.add(waiting, "layer", counting(log, "waiting"))
    interceptors.add(net, "layer", counting(log, "net"))
    thread = threading.Thread(target=waiting, args=(X,))
    thread.start()
    assert inside.wait(10)
    net(X)
    go_on.set()
    thread.join()
    assert log == ["waiting", "net"]


def test_nothing_hangs_on_the_model(net, interceptors):
    before = {name: (type(module), dict(vars(module))) for name, module in net.named_modules()}
    interceptors.add(net, "layer", counting([]))
    after = {name: (type(module), dict(vars(module))) for name, module in net.named_modules()}
    assert {name: (kind, list(attributes)) for name, (kind, attributes) in before.items()} == {
        name: (kind, list(attributes)) for name, (kind, attributes) in after.items()
    }
    assert type(net) is Net
    assert type(net.encoder) is nn.Linear


def test_copies_and_pickles_are_plain(net, interceptors):
    log = []
    interceptors.add(net, "layer", counting(log))
    for clone in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(clone) is Net
        clone(X)
    assert log == []


def test_close_leaves_the_classes_as_they_were(net):
    classes = (nn.Module, Net, Mixin, nn.Linear, nn.Sequential)
    before = [dict(vars(owner)) for owner in classes]
    interceptors = CallInterceptors()
    interceptors.add(net, "layer", counting([]))
    assert "forward" in vars(Net)
    assert vars(Net)["forward"] is not before[1]["forward"]
    interceptors.close()
    assert [dict(vars(owner)) for owner in classes] == before


def test_run_inside_a_run_has_its_own_layers_and_leaves_the_outer_ones(net, interceptors):
    log = []
    interceptors.add(net, "layer", counting(log, "outer run"))
    inner = CallInterceptors()
    inner.add(net, "layer", counting(log, "inner run"))
    net(X)
    inner.close()
    net(X)
    assert log == ["inner run", "outer run"]


def test_submodule_set_up_after_its_parent_keeps_one_layer_a_call(net, interceptors):
    log = []
    interceptors.add(net, "layer", counting(log, "net"))
    interceptors.add(net.encoder, "layer", counting(log, "encoder"))
    net(X)
    net.encoder(X)
    assert log == ["net", "encoder"]


def test_module_with_a_call_of_its_own_is_entered(interceptors):
    class Calls(nn.Module):
        def __call__(self, x):
            return x + 1

    log, model = [], Calls()
    interceptors.add(model, "layer", counting(log))
    assert model(1) == 2
    assert log == ["layer"]


def test_function_compiled_during_a_run_forgets_the_layers_with_it(net):
    """torch.compile traces the layers into its graph; the run's end has to make it trace again."""

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
