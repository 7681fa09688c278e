"""Last layers are found in the autograd graph, whatever the model's modules are called or shared."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from nano_loop.distributed.data_parallel.combining_operators import adds_samples, combines
from nano_loop.distributed.data_parallel.loss_graph import before_layers, split_by_depth


def names_of(model, *losses):
    """Return the names of the last layers' parameters, and of all others."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    last, earlier = split_by_depth(losses)
    return sorted(sorted(names[one] for one in layer) for layer in last), {names[one] for one in earlier}


def test_heads_are_last_and_their_trunk_is_not():
    model = nn.ModuleDict({"trunk": nn.Linear(3, 4), "one": nn.Linear(4, 2), "two": weight_norm(nn.Linear(4, 1))})
    x = torch.rand(5, 3, requires_grad=True)  # a leaf, but no parameter
    hidden = model["trunk"](x).tanh()
    loss = model["one"](hidden).mean() + model["two"](hidden).square().mean()
    weights = [f"two.parametrizations.weight.original{number}" for number in (0, 1)]
    heads = [["one.bias", "one.weight"], ["two.bias", *weights]]
    assert names_of(model, loss) == (heads, {"trunk.weight", "trunk.bias"})


def test_layer_is_not_last_where_another_loss_or_path_reaches_it_through_a_layer():
    model = nn.ModuleDict({"trunk": nn.Linear(3, 4), "head": nn.Linear(4, 1)})
    hidden = model["trunk"](torch.rand(5, 3))
    last = [["head.bias", "head.weight"]]
    assert names_of(model, hidden.mean() + model["head"](hidden).mean()) == (last, {"trunk.weight", "trunk.bias"})
    assert names_of(model, hidden.mean(), model["head"](hidden).mean()) == (last, {"trunk.weight", "trunk.bias"})


def test_tied_weight_is_among_both():
    model = nn.Linear(3, 3, bias=False)
    assert names_of(model, model(model(torch.rand(5, 3)).tanh()).mean()) == ([["weight"]], {"weight"})


def test_deep_graph_is_searched_without_recursion():
    model = nn.Linear(2, 2, bias=False)
    x = model(torch.rand(5, 2))
    for _ in range(3000):
        x = x * torch.ones(2)
    assert names_of(model, x.sum()) == ([["weight"]], set())


def test_operators_of_layers_combine_no_samples():
    model = nn.Sequential(nn.Linear(3, 4), nn.MaxPool1d(2), nn.Linear(2, 2))
    nodes = before_layers([model(torch.ones(5, 3)).mean().grad_fn])
    assert not any(combines(node, 5) or adds_samples(node, 5) for node in nodes)
