"""Modules whose file has changed since this process has imported them: workers import them anew, and get other code."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from nano_loop.cpu.parent_process import process_start
from nano_loop.errors import NanoError, error_message
from nano_loop.patching.walk import code_in


def refuse_edited_modules(functions: Iterable[tuple[ModuleType, FunctionType]]) -> None:
    """Raise if a function is not as the file of its module defines it now.

    Python keeps no source, so code in memory is compared with what the file compiles to. That is done for files that
    are newer than this process.

    Parameters
    ----------
    functions : iterable of (module, function)
        What workers are about to import.

    Raises
    ------
    NanoError
        With the name of the file.
    """
    codes: dict[str, set[CodeType]] = defaultdict(set)
    for module, function in functions:
        loader = getattr(module.__spec__, "loader", None)  # another one may compile in another way, as pytest's does
        if type(loader) is SourceFileLoader and function.__code__.co_filename == loader.path:  # decorators have others
            codes[loader.path].add(function.__code__)
    for path, known in codes.items():
        if _has_changed(path, known):
            expected = "worker processes import it from that file, and would compute by other code"
            raise NanoError(error_message(f"{path} has changed since it was imported", expected, "Restart the program"))


def _has_changed(path: str, codes: set[CodeType]) -> bool:
    try:
        if os.stat(path).st_ctime < process_start():
            return False
        return not codes <= {*code_in(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True))}
    except OSError:  # it has gone, which the worker says
        return False
    except (SyntaxError, ValueError):  # it is being edited
        return True
