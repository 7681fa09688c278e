"""The output of commands: JSON of one shape."""

from __future__ import annotations

import json
from typing import Any

#: The version of the shape of what `--json` prints. It is raised when an entry is removed or changes its meaning.
SHAPE = 2


def as_text(command: str, **content: Any) -> str:
    """Return one JSON object, which says the version of its shape and the command."""
    return json.dumps({"version": SHAPE, "command": command, **content}, indent=2)
