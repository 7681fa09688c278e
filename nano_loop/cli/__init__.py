"""The command line: `nano-loop`, or `python -m nano_loop`. Each command has a module."""

from __future__ import annotations

import json
from typing import Any

#: The version of the shape of what `--json` prints. It is raised when an entry is removed or changes its meaning.
SHAPE = 3


def as_text(command: str, **content: Any) -> str:
    """Return one JSON object, which says the version of its shape and the command."""
    return json.dumps({"version": SHAPE, "command": command, **content}, indent=2)
