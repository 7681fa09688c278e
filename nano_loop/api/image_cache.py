"""`patch_torch` and `unpatch_torch`: the cache of decoded images for loaders outside a run.

The other image modules are imported only with torchvision, because they need Pillow, which nano_loop does not require.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from nano_loop.config.options import Options
from nano_loop.data.images.pipelines import compositions
from nano_loop.errors import NanoError
from nano_loop.integrations.cuda_calls import patch_cuda, unpatch_cuda
from nano_loop.patching.loaders import implicit_loaders_changed
from nano_loop.patching.patch_table import until_undone

if TYPE_CHECKING:
    from nano_loop.data.images.folders import CachedImages

_lock = threading.RLock()


def patch_torch(cuda_to_cpu: bool = False, *, image_cache: Any = None, exact_images: bool = True) -> None:
    """Cache the decoded and resized images of all loaders that this thread iterates, until `unpatch_torch`.

    It does the same as the option ``fast_images``, for loops without a run. A second call replaces the first.

    Parameters
    ----------
    cuda_to_cpu : bool
        Whether to call `patch_cuda` as well. BigDL-Nano's default was True.
    image_cache, exact_images
        The options of these names; see `nano_loop.nano`.

    Raises
    ------
    NanoConfigError
        If an argument has a value that the option does not allow.
    """
    options = Options(image_cache=image_cache, exact_images=exact_images)
    place: Any = options.image_cache

    def find(loader: DataLoader[Any]) -> CachedImages | None:
        if not compositions():
            return None
        from nano_loop.data.images.folders import CachedImages, datasets_in, refusal
        from nano_loop.data.images.lifetime import store_for

        if refusal(loader):
            return None
        try:
            return CachedImages(store_for(datasets_in(loader.dataset), place), options.exact_images)
        except (OSError, NanoError):  # there is no folder for the cache
            return None

    with _lock:
        unpatch_torch()
        with ExitStack() as stack:
            stack.enter_context(implicit_loaders_changed(find))
            if cuda_to_cpu:
                patch_cuda()
                stack.callback(unpatch_cuda)
            until_undone[patch_torch] = stack.pop_all()


def unpatch_torch() -> None:
    """Undo `patch_torch`, including its CUDA patches. Has no effect if `patch_torch` was not called."""
    with _lock:
        until_undone.pop(patch_torch, ExitStack()).close()
