"""Function names are found in a model's code, and in functions of its package that the model calls."""

import importlib
import types

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import dropout as dropped

from nano_loop.runtime.objects.called_functions import names_called


def attended(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return self.inner(self.dropout(x))


class Calls(Base):
    def inner(self, x):
        return [F.layer_norm(attended(y), y.shape) for y in x]


class Drops(Base):
    def inner(self, x):
        return dropped(x, training=self.training)


def test_functions_in_methods_comprehensions_and_called_functions_are_found():
    called = names_called(nn.Sequential(Calls()))
    assert {"scaled_dot_product_attention", "layer_norm"} <= called
    assert not {"relu", "F.layer_norm"} & called
    assert "dropout" in names_called(Drops())
    assert not names_called(nn.TransformerEncoderLayer(4, 1))


class Keeps(nn.Module):
    """Has layers that torch does not see."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers


def test_functions_of_layers_in_lists_and_dicts_are_found():
    assert "layer_norm" in names_called(nn.Sequential(Keeps([Calls()])))
    assert "dropout" in names_called(Keeps({"first": (Keeps([Drops()]),), "data": [*range(10_000)]}))
    assert "dropout" not in names_called(Keeps([*range(10_000), Drops()]))


class Proxy:
    """Like a handle of a service that does not exist yet."""

    def __call__(self, x):
        return x

    @property
    def __class__(self):
        raise RuntimeError

    def __getattr__(self, name):
        raise RuntimeError(name)


lazy, proxy = types.ModuleType("lazy"), Proxy()
lazy.__getattr__ = lambda name: importlib.import_module(f"not_installed_{name}")


class Lazy(nn.Module):
    def forward(self, x):
        x = torch.ops.aten.gelu(proxy(x)) + torch.classes.not_there.Kernel()(x)
        return lazy.kernels.attention(proxy.x)


def test_names_are_read_without_code_of_what_they_name():
    assert {"gelu", "Kernel", "attention"} <= names_called(nn.Sequential(Lazy()))
