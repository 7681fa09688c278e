"""Plans of torchvision's pipelines: which transforms come first and are deterministic, and which convert at the end.

Only classes in the tables below are understood, by their exact types and with exactly the attributes that are listed.
A subclass, a `Lambda`, a module with hooks and a class of another version with one more attribute are not.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from nano_loop.patching.torch_private import calls_only_forward, image_preset

V1, V2 = "torchvision.transforms", "torchvision.transforms.v2"

_RESIZE = ("antialias", "interpolation", "max_size", "size")
_PAD = ("fill", "padding", "padding_mode")
_NORMALIZE = ("inplace", "mean", "std")

#: Deterministic transforms of pixels, with their attributes, by the module that has them.
_PIXELS = {
    V1: {
        "Resize": _RESIZE,
        "CenterCrop": ("size",),
        "Pad": _PAD,
        "Grayscale": ("num_output_channels",),
        "PILToTensor": (),
    },
    V2: {
        "Resize": _RESIZE,
        "CenterCrop": ("size",),
        "Pad": ("_fill", *_PAD),
        "Grayscale": ("num_output_channels",),
        "RGB": (),
        "PILToTensor": (),
        "ToImage": (),
        "Identity": (),
    },
}
#: Transforms to floating-point numbers and of these, which can be applied to whole batches.
_FLOATS = {
    V1: {"ToTensor": (), "ConvertImageDtype": ("dtype",), "Normalize": _NORMALIZE},
    V2: {
        "ToTensor": (),
        "ConvertImageDtype": ("dtype",),
        "ToDtype": ("dtype", "scale"),
        "Normalize": _NORMALIZE,
        "ToPureTensor": (),
    },
}
_OF_A_MODULE = {"training"}
_MUTABLE = (list, dict, set)
_HOLDERS = (*_MUTABLE, tuple)
_MOST_PLANS = 16


class Known(NamedTuple):
    """A class of transforms that is understood."""

    module: str
    name: str
    attributes: frozenset[str]
    of_pixels: bool


class Conversion(NamedTuple):
    """The end of a pipeline, from bytes to normalized numbers."""

    first: int  # the position of its first transform
    from_pil: bool  # whether that takes a Pillow image
    divides: bool  # whether bytes are divided by 255, and else multiplied by 1/255: the results differ in the last bit
    normalizations: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]  # means and standard deviations, in order
    typed: bool  # whether an image is a `torchvision.tv_tensors.Image` on the way


class Plan(NamedTuple):
    """How a pipeline is run."""

    transforms: tuple[Any, ...]  # all of its transforms
    prefix: int  # how many of them, from the first on, are deterministic and give pixels
    key: str  # what the result of these depends on, besides the image
    resizes: bool  # whether one of these resizes
    conversion: Conversion | None  # what can be applied to whole batches

    @property
    def names(self) -> list[str]:
        """The names of the deterministic transforms."""
        return [type(transform).__name__ for transform in self.transforms[: self.prefix]]


_Attributes = list[tuple[type, dict[str, Any]]]


class Plans:
    """The plans of pipelines, each kept until an attribute of its transforms changes.

    That is asked for each image. To compare attributes takes a fifth of the time of reading them.
    """

    def __init__(self) -> None:
        self._read: dict[int, tuple[Plan, _Attributes]] = {}

    def of(self, pipeline: Any) -> Plan | None:
        """Return how to run a pipeline, as `plan_of` does."""
        transforms = transforms_of(pipeline)
        if transforms is None:
            return None
        known = self._read.get(id(pipeline))  # of another pipeline with this id, the transforms are others
        if known is not None and _is_unchanged(transforms, known[0].transforms, known[1]):
            return known[0]
        plan = _plan_of(transforms)
        self._read.pop(id(pipeline), None)
        if len(self._read) < _MOST_PLANS and not any(map(_holds_nested, transforms)):
            self._read[id(pipeline)] = plan, [_copied(transform) for transform in transforms]
        return plan


def _is_unchanged(now: tuple[Any, ...], then: tuple[Any, ...], attributes: _Attributes) -> bool:
    if len(now) != len(then) or not all(map(operator.is_, now, then)):
        return False
    try:
        return all(
            type(transform) is kind and vars(transform) == own
            for transform, (kind, own) in zip(now, attributes, strict=True)
        )
    except (RuntimeError, ValueError, TypeError):  # another tensor, or an array, is compared element by element
        return False


def _copied(transform: Any) -> tuple[type, dict[str, Any]]:
    """Return the class and the attributes of a transform, with copies of what can change in its place."""
    return type(transform), {
        name: copy(var) if isinstance(var, _MUTABLE) else var for name, var in vars(transform).items()
    }


def _holds_nested(transform: Any) -> bool:
    """Whether an attribute could change deeper inside than `_copied` copies, or there are none to compare."""
    values = getattr(transform, "__dict__", {"": [[]]}).values()
    inner = (value.values() if isinstance(value, dict) else value for value in values if isinstance(value, _HOLDERS))
    return any(isinstance(item, _HOLDERS) for items in inner for item in items)


def plan_of(pipeline: Any) -> Plan | None:
    """Return how to run a pipeline with its present attributes, which a loop may change; None if it is not one."""
    transforms = transforms_of(pipeline)
    return None if transforms is None else _plan_of(transforms)


def _plan_of(transforms: tuple[Any, ...]) -> Plan:
    descriptions = [described(transform) for transform in transforms]
    prefix = 0
    while prefix < len(transforms) and (description := descriptions[prefix]) is not None and description[0].of_pixels:
        prefix += 1
    key = ";".join(description[1] for description in descriptions[:prefix] if description)
    known = [description[0] if description else None for description in descriptions]
    resizes = any(entry is not None and entry.name == "Resize" for entry in known[:prefix])
    return Plan(transforms, prefix, key, resizes, _conversion(transforms, known, prefix))


def transforms_of(pipeline: Any) -> tuple[Any, ...] | None:
    """Return the transforms of a `Compose` or of a preset of torchvision's weights, or None for other objects."""
    if type(pipeline) in compositions():
        transforms = pipeline.transforms
        return tuple(transforms) if isinstance(transforms, Sequence) else None
    if type(pipeline) is image_preset() and _is_as_its_class(pipeline):
        return _of_preset(
            *(_frozen(getattr(pipeline, name)) for name in ("resize_size", "crop_size", "mean", "std")),
            pipeline.interpolation,
            pipeline.antialias,
        )
    return None


def applied(transforms: Sequence[Any], value: Any) -> Any:
    """Return what transforms make of an image, one after another."""
    for transform in transforms:
        value = transform(value)
    return value


def compositions() -> tuple[type, ...]:
    """Return torchvision's classes `Compose`, as far as they are imported."""
    return tuple(sys.modules[name].Compose for name in (V1, V2) if name in sys.modules)


def described(transform: Any) -> tuple[Known, str] | None:
    """Return the class of a transform and what its result depends on, or None if it is not understood."""
    known = _known_classes(V2 in sys.modules).get(type(transform))
    if known is None or not _is_as_its_class(transform):
        return None
    own = vars(transform)
    names = {name for name in own if not name.startswith("_")} - _OF_A_MODULE
    if names | {name for name in known.attributes if name in own} != known.attributes:
        return None
    values = [(name, own[name]) for name in sorted(known.attributes)]
    if not all(_is_plain(value) for _, value in values):
        return None
    return known, f"{known.module}.{known.name}{values!r}"


@functools.cache
def _known_classes(with_v2: bool) -> dict[type, Known]:
    known_classes = {}
    for of_pixels, table in ((True, _PIXELS), (False, _FLOATS)):
        for module, classes in table.items():
            if module == V1 or with_v2:
                for name, attributes in classes.items():
                    kind = getattr(sys.modules[module], name, None)
                    if kind is not None:
                        known_classes[kind] = Known(module, name, frozenset(attributes), of_pixels)
    return known_classes


def _is_as_its_class(transform: Any) -> bool:
    """Whether calling a transform runs its class's code and nothing else."""
    return calls_only_forward(transform) if isinstance(transform, nn.Module) else "__call__" not in vars(transform)


def _is_plain(value: Any) -> bool:
    """Whether the `repr` of a value says all of it."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, (enum.Enum, torch.dtype, type)):
        return True
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) is dict and all(_is_plain(part) for item in value.items() for part in item)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@functools.lru_cache(maxsize=16)
def _of_preset(size: Any, crop: Any, mean: Any, std: Any, interpolation: Any, antialias: Any) -> tuple[Any, ...]:
    v1: Any = sys.modules[V1]
    return (
        v1.Resize(list(size), interpolation=interpolation, antialias=antialias),
        v1.CenterCrop(list(crop)),
        v1.PILToTensor(),
        v1.ConvertImageDtype(torch.float),
        v1.Normalize(list(mean), list(std)),
    )


def _conversion(transforms: Sequence[Any], known: Sequence[Known | None], prefix: int) -> Conversion | None:
    """Read a pipeline from its end: normalizations, before them a conversion to floats, before it one to a tensor."""
    names = [entry.name if entry else "" for entry in known]
    first = len(names)
    while first > prefix and names[first - 1] in ("Normalize", "ToPureTensor"):
        first -= 1
    normalizations = tuple(
        (_numbers(transform.mean), _numbers(transform.std))
        for transform in transforms[first:]
        if hasattr(transform, "mean")
    )
    if first <= prefix or any(len(mean) != len(std) for mean, std in normalizations):
        return None
    first -= 1
    scaling, kind = transforms[first], known[first]
    if kind is None:
        return None
    typed = V2 in {entry.module for entry in known if entry}
    if kind.name == "ToTensor":
        return Conversion(first, True, True, normalizations, typed)
    to_float = kind.name in ("ConvertImageDtype", "ToDtype") and scaling.dtype is torch.float32
    if not to_float or not getattr(scaling, "scale", True):
        return None
    from_pil = first > prefix and names[first - 1] in ("PILToTensor", "ToImage")
    return Conversion(first - from_pil, from_pil, kind.module == V1, normalizations, typed)


def _numbers(value: Any) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
