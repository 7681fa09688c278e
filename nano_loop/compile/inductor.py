"""Arguments of `torch.compile`: Inductor draws as plain loops do, and keeps its files in a folder of the user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nano_loop.errors import NanoError
from nano_loop.patching.torch_private_compiler import mode_options
from nano_loop.storage.cache_folder import cache_folder, inductor_folder
from nano_loop.storage.trusted_files import open_folder

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def arguments_with(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's arguments of `torch.compile` with what Inductor needs to draw as the plain loop does.

    The user's options prevail. Another backend than Inductor gets the arguments unchanged.
    """
    arguments = dict(options)
    if arguments.get("backend") not in (None, "inductor"):
        return arguments
    # torch takes a mode or options.
    modes = mode_options(arguments.pop("mode", None), arguments.get("dynamic"))
    # Random numbers come from torch's generator, in order. Inductor's own would be seeded from it, which leaves it in
    # another state than the plain loop does: the next shuffle of a loader would differ.
    # Headers that are precompiled lie in Inductor's folder for all, whatever `own_cache` says.
    ours = {"fallback_random": True, "cpp_cache_precompile_headers": False}
    arguments["options"] = {**ours, **modes, **(arguments.get("options") or {})}
    return arguments


@contextmanager
def own_cache() -> Iterator[None]:
    """Let Inductor keep what it compiles below nano_loop's cache folder, unless the user has named a folder.

    Its default belongs to whoever has made it first: it lies in the folder for temporary files, by the user's name.
    Where nano_loop has no folder that it can trust, Inductor has a private one for the run.
    """
    before = os.environ.get(_CACHE)
    with ExitStack() as stack:
        if before in (None, inductor_folder()):
            os.environ[_CACHE] = _trusted_folder(cache_folder()) or stack.enter_context(
                tempfile.TemporaryDirectory(prefix="torchinductor-", ignore_cleanup_errors=True)
            )
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(_CACHE, None)
            else:
                os.environ[_CACHE] = before


def _trusted_folder(folder: Path | None) -> str | None:
    """Return the folder below nano_loop's cache folder, or None where there is none, or another user can change it."""
    if folder is None:
        return None
    try:
        os.close(open_folder(folder))
    except (OSError, NanoError):
        return None
    return str(folder / "torchinductor")
