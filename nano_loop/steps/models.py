"""Which models call the operators whose kernels a step replaces, judged by their modules and the names in their code.

A name, such as ``dropout`` of `torch.nn.functional.dropout`, may also be that of an attribute; the step then finds
nothing to compute.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import nn

from nano_loop.kernels import embedding
from nano_loop.patching.attributes import defined_in
from nano_loop.patching.members import parameters_of
from nano_loop.patching.walk import CONTAINERS, code_in, items_of, length_of, walk
from nano_loop.runtime.objects.training_objects import class_name, has_modules

_MOST = 1000  # maximum number of functions of a class and those that they call
_LONGEST = 1000  # maximum length of a list of layers: longer ones hold data


def names_called(model: nn.Module) -> frozenset[str]:
    """Return the names in the code of a model's modules, and of the library functions that it calls.

    This covers the methods of their classes, except torch's own, and functions of the same package that these name. It
    does not run the program's code: a module may import a package on attribute access.
    """
    kinds: set[Any] = {type(value) for value in walk([model], _modules_in) if isinstance(value, nn.Module)}
    return frozenset().union(*map(_names_in, kinds))


def _modules_in(value: Any) -> Iterator[Any]:
    """Yield the modules in a module, and in its lists and dicts, in which Keras stores layers."""
    if isinstance(value, nn.Module):
        yield from value.children()
        yield from (attribute for attribute in vars(value).values() if isinstance(attribute, CONTAINERS))
    elif length_of(value) <= _LONGEST:
        yield from (item for item in items_of(value) if isinstance(item, (nn.Module, *CONTAINERS)))


@functools.lru_cache(maxsize=1000)
def _names_in(kind: type) -> frozenset[str]:
    own = [base for base in kind.__mro__ if _package(base) != "torch"]
    packages = {_package(base) for base in own}
    methods = [
        inspect.unwrap(value) for base in own for value in defined_in(base).values() if inspect.isfunction(value)
    ]

    def named(function: Any) -> Iterable[Any]:
        return _named(function)[1] if type(function) is FunctionType and _package(function) in packages else ()

    reached = [*walk(methods, named, most=_MOST)]
    names = (_named(function)[0] for function in reached if _package(function) in packages)
    return frozenset(function.__name__ for function in reached if _package(function) not in packages).union(*names)


@functools.lru_cache(maxsize=10_000)  # classes of a library call the same functions
def _named(function: Any) -> tuple[frozenset[str], tuple[Any, ...]]:
    """Return the names in the code of a function, and the functions that these refer to, also through modules."""
    if type(function) is not FunctionType:
        return frozenset(), ()
    names = frozenset(name for code in code_in(function.__code__) for name in code.co_names)

    def named_in(value: Any) -> Iterable[Any]:
        names_of = function.__globals__ if value is function else vars(value) if _is_module(value) else {}
        return (names_of[name] for name in names if name in names_of)

    values = walk([function], named_in)
    return names, tuple(value for value in values if type(value) in (FunctionType, BuiltinFunctionType))


def _is_module(value: Any) -> bool:
    return issubclass(type(value), ModuleType)


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d),
    *(nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
)
#: Minimum number of outputs of a layer. With fewer classes, the loss is a small part of a step.
MANY_CLASSES = 1000
#: Minimum number of elements of a matrix. For smaller ones, the overhead of a replaced operator outweighs the gain.
LARGE, LARGE_IN_FP32 = 1 << 17, 1 << 13
_MATRIX = 2


def calling(*functions: str, modules: tuple[type[nn.Module], ...] = ()) -> Callable[[nn.Module], bool]:
    """Return a predicate: whether a model has one of these modules, or calls one of these functions of torch."""
    return lambda model: has_modules(model, modules) or not names_called(model).isdisjoint(functions)


has_norms = calling("batch_norm", "instance_norm", "group_norm", "layer_norm", "rms_norm", modules=_NORMS)
has_convolutions = calling(
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
    modules=_CONVOLUTIONS,
)
has_recurrent_layers = calling(modules=(nn.RNN, nn.GRU, nn.LSTM))
_calls_attention = calling("scaled_dot_product_attention", "multi_head_attention_forward")
_looks_up = calling("embedding", "embedding_bag", modules=(nn.Embedding, nn.EmbeddingBag))


def has_attention(model: nn.Module) -> bool:
    """Whether a module of the model has attention in its name, or calls torch's attention function."""
    names = (f"{name} {class_name(module)}".lower() for name, module in model.named_modules())
    return any("attention" in name or "attn" in name for name in names) or _calls_attention(model)


def has_dropout(model: nn.Module) -> bool:
    """Whether a module or a called function has dropout in its name, or a layer of torch applies dropout."""
    if any(isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout for module in model.modules()):
        return True
    names = chain(map(class_name, model.modules()), names_called(model))
    return any(word in name.lower() for name in names for word in ("drop", "bernoulli"))


def has_tanh(model: nn.Module) -> bool:
    """Whether a module may compute tanh, or GELU with the tanh approximation."""
    classes = (module.approximate if isinstance(module, nn.GELU) else class_name(module) for module in model.modules())
    return any("tanh" in name.lower() or "gelu" in name.lower() for name in chain(classes, names_called(model)))


def has_many_classes(model: nn.Module) -> bool:
    """Whether a layer has as many outputs as a vocabulary."""
    return any(weight.dim() >= _MATRIX and weight.size(0) >= MANY_CLASSES for weight in parameters_of(model))


def has_large_tables(model: nn.Module) -> bool:
    """Whether a model has an embedding with a large enough table."""
    tables = (weight for weight in parameters_of(model) if weight.dim() == _MATRIX)
    return any(weight.numel() >= embedding.MIN_ELEMENTS for weight in tables) and _looks_up(model)


def has_large_matrix(model: nn.Module) -> bool:
    """Whether a model has a matrix for products that is large enough in bf16."""
    return _has_matrix(model, LARGE)


def has_large_matrix_in_fp32(model: nn.Module) -> bool:
    """Whether a model has a matrix for products that is large enough in fp32."""
    return _has_matrix(model, LARGE_IN_FP32)


def _has_matrix(model: nn.Module, elements: int) -> bool:
    return any(weight.dim() == _MATRIX for weight in large_weights(model, elements))


def large_weights(model: nn.Module, elements: int) -> Iterator[nn.Parameter]:
    """Yield the parameters for products, not of embeddings, with at least this many elements."""
    for module in model.modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield from (weight for weight in parameters_of(module, recurse=False) if weight.numel() >= elements)
