"""Where modules keep functions for files by names of their own, as ``from os import listdir`` leaves them.

To find them takes a look at every name of every module, in a forked process with a copy of each page that it looks at:
100 ms. So the process that workers are forked from does it once, and a worker looks at what has been imported since.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

_OURS = __name__.rpartition(".")[0]


class Importers:
    """The places in modules where some functions are.

    Parameters
    ----------
    functions : callable
        Returns the functions that are looked for.
    """

    def __init__(self, functions: Callable[[], Iterable[Any]]) -> None:
        self._functions = functions
        self._places: list[tuple[dict[str, Any], str, Any]] = []
        self._looked_at: dict[int, Any] = {}  # modules, by their ids; kept alive, so that these are not reused
        self._looked_for: set[int] = set()

    def look(self) -> None:
        """Look at the modules that have been imported since the last time."""
        wanted = {id(each) for each in self._functions()}
        if not wanted <= self._looked_for:  # a module has brought more of them
            self._looked_at.clear()
            self._places.clear()
            self._looked_for |= wanted
        for module in [*sys.modules.values()]:
            if id(module) not in self._looked_at:
                self._looked_at[id(module)] = module
                self._places += self._places_in(getattr(module, "__dict__", None))

    def replace(self, replaced: dict[int, tuple[Any, Any]]) -> None:
        """Set what functions are replaced with, in all places.

        Parameters
        ----------
        replaced : dict
            Functions with their replacements, by the ids of the former.
        """
        for names, name, function in self._places:
            if names.get(name) is function and id(function) in replaced:
                names[name] = replaced[id(function)][1]

    def _places_in(self, names: Any) -> list[tuple[dict[str, Any], str, Any]]:
        if not isinstance(names, dict) or str(names.get("__name__")).startswith(_OURS):
            return []
        return [(names, name, value) for name, value in [*names.items()] if id(value) in self._looked_for]
