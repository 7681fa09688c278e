"""Where modules keep functions for files under other names, as ``from os import listdir`` leaves them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_OURS = __name__.rpartition(".")[0]


def replace_in_importers(replaced: Mapping[int, tuple[Any, Any]]) -> None:
    """Set what functions are replaced with in all modules that have imported them by name.

    Parameters
    ----------
    replaced : mapping
        Functions with their replacements, by the ids of the former.
    """
    for module in [*sys.modules.values()]:
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and not str(names.get("__name__")).startswith(_OURS):
            replace_values(names, replaced)


def replace_values(names: dict[Any, Any], replaced: Mapping[int, tuple[Any, Any]]) -> None:
    """Do that in one dict."""
    for name in [name for name, value in [*names.items()] if id(value) in replaced]:
        names[name] = replaced[id(names[name])][1]
