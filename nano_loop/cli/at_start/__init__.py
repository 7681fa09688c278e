"""The folder of a hook that each Python process with this folder in ``PYTHONPATH`` runs at startup."""

from __future__ import annotations

import os
from collections.abc import Mapping

_PATH = "PYTHONPATH"


def search_path(environ: Mapping[str, str]) -> str:
    """Return the value of ``PYTHONPATH`` with the folder prepended."""
    others = [path for path in environ.get(_PATH, "").split(os.pathsep) if path != _FOLDER]
    return os.pathsep.join([_FOLDER, *others] if others != [""] else [_FOLDER])


_FOLDER = os.path.dirname(__file__)
