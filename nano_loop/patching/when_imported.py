"""Changes to modules that are made right after their import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class WhenImported(MetaPathFinder):
    """Processes modules right after they are imported, before the importing code continues.

    Parameters
    ----------
    waiting : dict
        The value to pass to `do`, by module name. Entries are removed once processed.
    do : callable
        Called with a module and its value in `waiting`.
    """

    def __init__(self, waiting: dict[str, Any], do: Callable[[ModuleType, Any], object]) -> None:
        self._waiting, self._do = waiting, do

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader.exec_module = self._executing(spec.loader.exec_module)  # type: ignore[method-assign, assignment]
                return spec
        return None

    def _executing(self, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ in self._waiting:
                self._do(module, self._waiting.pop(module.__name__))

        return exec_module
