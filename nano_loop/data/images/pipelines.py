"""Plans of torchvision's pipelines: which transforms come first and are deterministic, and which convert at the end.

Transforms are recognized by their exact class. Subclasses, `Lambda`, modules with hooks, and transforms with an
attribute whose `repr` is incomplete are not recognized.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from nano_loop.patching.attributes import has_own
from nano_loop.patching.torch_private import calls_only_forward

V1, V2 = "torchvision.transforms", "torchvision.transforms.v2"
#: Transforms from Pillow image to Pillow image that do not draw random numbers.
_DETERMINISTIC = ("Resize", "CenterCrop", "Pad", "Grayscale", "RGB", "Identity")
_OF_A_MODULE = frozenset(vars(nn.Module()))


class Plan(NamedTuple):
    """The plan for running a pipeline."""

    first: tuple[Any, ...]  # its deterministic transforms
    key: str  # the parameters that determine their result for an image
    middle: tuple[Any, ...]  # the transforms after them
    end: tuple[Any, ...]  # `ToTensor` and `Normalize`, which can be applied to whole batches


def compositions() -> tuple[type, ...]:
    """Return torchvision's `Compose` classes that are imported."""
    return tuple(sys.modules[name].Compose for name in (V1, V2) if name in sys.modules)


def plan_of(pipeline: Any) -> Plan | None:
    """Return the plan of a pipeline with its current attributes, which a loop may change; None for other objects."""
    transforms = _transforms_of(pipeline)
    if transforms is None:
        return None
    keys = [_key(transform) for transform in transforms]
    first = keys.index(None) if None in keys else len(keys)
    end = _end(transforms)
    return Plan(transforms[:first], ";".join(map(str, keys[:first])), transforms[first:end], transforms[end:])


def applied(transforms: Sequence[Any], value: Any) -> Any:
    """Apply transforms to an image, one after another."""
    for transform in transforms:
        value = transform(value)
    return value


def numbers(value: Any) -> tuple[float, ...]:
    """Return the means or deviations of `Normalize`, one per channel or one for all; empty for other values."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values if {*map(type, values)} <= {int, float} else ()


def _transforms_of(pipeline: Any) -> tuple[Any, ...] | None:
    """Return the transforms of a `Compose` or of a classifier's ``weights.transforms()``, or None for other objects."""
    name = _name(pipeline)
    if name == "Compose" and isinstance(pipeline.transforms, Sequence):
        return tuple(pipeline.transforms)
    if name != "ImageClassification":
        return None
    v1: Any = sys.modules[V1]
    return (
        v1.Resize(pipeline.resize_size, interpolation=pipeline.interpolation, antialias=pipeline.antialias),
        v1.CenterCrop(pipeline.crop_size),
        v1.PILToTensor(),
        v1.ConvertImageDtype(torch.float),
        v1.Normalize(pipeline.mean, pipeline.std),
    )


def _name(transform: Any) -> str:
    """Return the name of a torchvision class, or "" if a call would run other code than that class's."""
    kind = type(transform)
    if not kind.__module__.startswith(f"{V1}.") or not has_own(kind, "forward", "transform"):
        return ""
    has_hooks = isinstance(transform, nn.Module) and not calls_only_forward(transform)
    return "" if has_hooks else kind.__name__


def _key(transform: Any) -> str | None:
    """Return the parameters that determine a deterministic transform's result, or None if it is not recognized."""
    if _name(transform) not in _DETERMINISTIC:
        return None
    attributes = {name: value for name, value in vars(transform).items() if name not in _OF_A_MODULE}
    if not all(map(_is_plain, attributes.values())):
        return None
    return f"{type(transform).__module__}.{type(transform).__name__}{sorted(attributes.items())!r}"


def _is_plain(value: Any) -> bool:
    """Whether the `repr` of a value is complete."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, (enum.Enum, type)):
        return True
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) is dict and all(map(_is_plain, (*value.keys(), *value.values())))


def _end(transforms: tuple[Any, ...]) -> int:
    """Return the position of a `ToTensor` that only `Normalize` follows, or the number of transforms."""
    end = len(transforms)
    while end and _is_normalization(transforms[end - 1]):
        end -= 1
    return end - 1 if end and _name(transforms[end - 1]) == "ToTensor" else len(transforms)


def _is_normalization(transform: Any) -> bool:
    return _name(transform) == "Normalize" and len(numbers(transform.mean)) == len(numbers(transform.std)) > 0
