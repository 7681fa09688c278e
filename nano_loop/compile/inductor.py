"""Arguments of `torch.compile`: Inductor draws the random numbers of plain loops, and has a folder of the user."""

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
    """Return the user's arguments of `torch.compile`, extended so that Inductor draws as the plain loop does.

    The user's options take precedence. Backends other than Inductor get the arguments unchanged.
    """
    arguments = dict(options)
    if arguments.get("backend") not in (None, "inductor"):
        return arguments
    # torch accepts either a mode or options.
    modes = mode_options(arguments.pop("mode", None), arguments.get("dynamic"))
    # Random numbers come from torch's generator, in order. Inductor's own would be seeded from it, which leaves it in
    # another state than the plain loop does: the next shuffle of a loader would differ.
    # Precompiled headers are always stored in Inductor's shared folder, regardless of `own_cache`.
    ours = {"fallback_random": True, "cpp_cache_precompile_headers": False}
    arguments["options"] = {**ours, **modes, **(arguments.get("options") or {})}
    return arguments


@contextmanager
def own_cache() -> Iterator[None]:
    """Make Inductor store compiled code below nano_loop's cache folder, unless the user has set a folder.

    Its default folder is named after the user in the folder for temporary files, and belongs to whoever creates it
    first. If nano_loop has no trusted folder, Inductor gets a private one for the run.
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
    """Return the folder below nano_loop's cache folder; None if there is none or another user can change it."""
    if folder is None:
        return None
    try:
        os.close(open_folder(folder))
    except (OSError, NanoError):
        return None
    return str(folder / "torchinductor")
