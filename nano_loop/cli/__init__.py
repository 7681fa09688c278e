"""The command line: `nano-loop`, or `python -m nano_loop`. Each command has its own module."""

from __future__ import annotations

import json
from typing import Any

#: The version of the `--json` schema. It is increased when an entry is removed or changes its meaning.
SHAPE = 3


def as_text(command: str, **content: Any) -> str:
    """Return one JSON object with the content, the schema version and the command."""
    return json.dumps({"version": SHAPE, "command": command, **content}, indent=2)
