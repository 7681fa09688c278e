"""Which models call the operators whose kernels a step replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from torch import nn

from nano_loop.kernels import embedding
from nano_loop.patching.members import has_shape, parameters_of, shaped
from nano_loop.runtime.objects.called_functions import names_called
from nano_loop.runtime.objects.training_objects import class_names, has_modules

_CONVOLUTIONS = (*(nn.Conv1d, nn.Conv2d, nn.Conv3d), *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
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
    names = chain((name for name, _ in model.named_modules()), class_names(model.modules()))
    return any(word in name.lower() for name in names for word in ("attention", "attn")) or _calls_attention(model)


def has_dropout(model: nn.Module) -> bool:
    """Whether a module or a called function has dropout in its name, or a layer of torch applies dropout."""
    if any(isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout for module in model.modules()):
        return True
    names = class_names(model.modules()) | names_called(model)
    return any(word in name.lower() for name in names for word in ("drop", "bernoulli"))


def has_tanh(model: nn.Module) -> bool:
    """Whether a module may compute tanh, or GELU with the tanh approximation."""
    gelus = [module for module in model.modules() if isinstance(module, nn.GELU)]
    classes = class_names(module for module in model.modules() if not isinstance(module, nn.GELU))
    names = chain((module.approximate for module in gelus), classes, names_called(model))
    return any("tanh" in name.lower() or "gelu" in name.lower() for name in names)


def has_many_classes(model: nn.Module) -> bool:
    """Whether a layer has as many outputs as a vocabulary, or is lazy, so that it may have."""
    return any(
        not has_shape(weight) or (weight.dim() >= _MATRIX and weight.size(0) >= MANY_CLASSES)
        for weight in parameters_of(model)
    )


def has_large_tables(model: nn.Module) -> bool:
    """Whether a model has an embedding with a large enough table."""
    tables = (weight for weight in shaped(parameters_of(model)) if weight.dim() == _MATRIX)
    return any(weight.numel() >= embedding.MIN_ELEMENTS for weight in tables) and _looks_up(model)


def has_large_matrix(model: nn.Module) -> bool:
    """Whether a model has a matrix for products that is large enough in bf16."""
    return _has_matrix(model, LARGE)


def has_large_matrix_in_fp32(model: nn.Module) -> bool:
    """Whether a model has a matrix for products that is large enough in fp32."""
    return _has_matrix(model, LARGE_IN_FP32)


def _has_matrix(model: nn.Module, elements: int) -> bool:
    return any(not has_shape(weight) or weight.dim() == _MATRIX for weight in large_weights(model, elements))


def large_weights(model: nn.Module, elements: int) -> Iterator[nn.Parameter]:
    """Yield the parameters for products, not of embeddings, with at least this many elements, and lazy ones."""
    for module in model.modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            weights = parameters_of(module, recurse=False)
            yield from (weight for weight in weights if not has_shape(weight) or weight.numel() >= elements)
