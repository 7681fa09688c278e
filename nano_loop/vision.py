"""A data pipeline for images that caches decoded and resized images, so that it keeps up with the loop.

`patch_torch` and `unpatch_torch` are imported on first use: steps import other modules of this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nano_loop.api.image_cache import patch_torch, unpatch_torch

__all__ = ["patch_torch", "unpatch_torch"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("nano_loop.api.image_cache"), name)
