"""The folder whose hook each Python runs at its start that has it in ``PYTHONPATH``."""

from __future__ import annotations

import os
from collections.abc import Mapping

from nano_loop.config.protocol import INSTALL
from nano_loop.errors import error_message

_PATH = "PYTHONPATH"


def search_path(environ: Mapping[str, str]) -> str:
    """Return the value of ``PYTHONPATH`` with the folder before what is there."""
    others = [path for path in environ.get(_PATH, "").split(os.pathsep) if path != _FOLDER]
    return os.pathsep.join([_FOLDER, *others] if others != [""] else [_FOLDER])


def with_line_at_end(environ: Mapping[str, str], script: str, *, installs: bool = False) -> dict[str, str]:
    """Return the environment for the Python that this process becomes; it prints a line if nano_loop is not used.

    Parameters
    ----------
    environ : mapping
        The environment that the script is to see.
    script : str
        Its name.
    installs : bool
        Whether what it trains is accelerated, and what the Pythons that it starts train. Then they see the folder, too.
    """
    message = unused_message(script, installs=installs)
    path = environ.get(_PATH)
    # Lines, which the start of Python reads without a module such as json, that the script may never import.
    note = [" ".join(f"nano-loop: {message}".split()), *([] if path is None else [path])]
    others = {name: value for name, value in environ.items() if name != INSTALL}
    return {
        **others,
        **({INSTALL: environ.get(INSTALL, "1")} if installs else {}),
        "_NANO_LOOP_AT_START": "\n".join(note),
        _PATH: search_path(environ),
    }


def unused_message(script: str, *, installs: bool) -> str:
    """Return what is said of a script that does not use nano_loop; `installs` is as in `with_line_at_end`."""
    return error_message(f"{script} {_UNUSED[installs][0]}", *_UNUSED[installs][1:])


_FOLDER = os.path.dirname(__file__)
#: What is said of a script that does not use nano_loop, by whether it is accelerated automatically.
_UNUSED = {
    False: (
        "has started no run of nano_loop",
        "options act on functions under @nano, TorchNano, accelerated and Lightning's Trainer",
        "Decorate its training function",
    ),
    True: (
        "has trained nothing",
        "it has run no backward, so there was nothing to accelerate",
        "If it is not a training script, pass --only-environment",
    ),
}
