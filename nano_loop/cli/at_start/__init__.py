"""The folder that `nano-loop run` puts first in ``PYTHONPATH``, for the start of one Python."""

from __future__ import annotations

import os
from collections.abc import Mapping

from nano_loop.errors import error_message


def with_line_at_end(environ: Mapping[str, str], script: str) -> dict[str, str]:
    """Return the environment for the Python that this process becomes; it prints a line if nano_loop is not used."""
    expected = "options act on functions under @nano, TorchNano, accelerated and Lightning's Trainer"
    message = error_message(f"{script} has begun no run of nano_loop", expected, "Decorate its training function")
    path = environ.get("PYTHONPATH")
    # Lines, which the start of Python reads without a module such as json, that the script may never import.
    note = [" ".join(f"nano-loop: {message}".split()), *([] if path is None else [path])]
    paths = [os.path.dirname(__file__), *([path] if path else [])]
    return {**environ, "_NANO_LOOP_AT_START": "\n".join(note), "PYTHONPATH": os.pathsep.join(paths)}
