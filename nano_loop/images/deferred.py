"""A Pillow image that is decoded when something first looks at its pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image

_DECODE, _SIZE, _MODE = "_nano_loop_decode", "_nano_loop_size", "_nano_loop_mode"


class DeferredImage(Image.Image):
    """The result of ``image.convert(mode)``, whose pixels may not be needed; `decode` returns the plain image.

    Size and mode are known. Any other attribute decodes the image and turns this object into a plain `PIL.Image.Image`
    with the attributes of the decoded one, as `PIL.ImageFile` does with an opened file.
    """

    def __init__(self, size: tuple[int, int], mode: str, decode: Callable[[], Image.Image]) -> None:
        # Not the __init__ of Pillow's class: its attributes come from the decoded image.
        vars(self).update({_DECODE: decode, _SIZE: size, _MODE: mode})

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, from which Pillow takes `width` and `height`."""
        return vars(self)[_SIZE]  # type: ignore[no-any-return]

    @property
    def mode(self) -> str:
        """The mode, such as ``"RGB"``."""
        return vars(self)[_MODE]  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(decoded(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(decoded(self), name, value)

    def __eq__(self, other: object) -> bool:
        return bool(decoded(self) == other)

    __hash__ = None  # type: ignore[assignment]  # as Pillow's

    def __reduce_ex__(self, protocol: Any) -> Any:
        return decoded(self).__reduce_ex__(protocol)


def decoded(image: Image.Image) -> Image.Image:
    """Decode an image if that is still to be done. It stays the same object."""
    if type(image) is DeferredImage:
        real = vars(image)[_DECODE]()
        attributes = dict(vars(real))
        object.__setattr__(image, "__class__", Image.Image)
        vars(image).clear()
        vars(image).update(attributes)
    return image


def is_deferred(image: Any) -> bool:
    """Whether nothing has looked at the pixels of an image yet."""
    return type(image) is DeferredImage
