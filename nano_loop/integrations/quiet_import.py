"""Imports a library whose import changes the process, and undoes the changes that can be undone."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def leaving_no_trace(library: str, *replaced: tuple[Any, str]) -> Iterator[None]:
    """Restore the environment, logging, warnings and `replaced` attributes after a library's first import."""
    if library in sys.modules:
        yield
        return
    with ExitStack() as undoing:
        undoing.enter_context(warnings.catch_warnings())
        # In a notebook without ipywidgets, importing tqdm warns.
        warnings.filterwarnings("ignore", "IProgress not found")
        if gc.isenabled():  # the import creates no garbage, and collections would take a fifth of the time
            undoing.callback(gc.enable)
            gc.disable()
        undoing.callback(_restore_environment, dict(os.environ))
        undoing.callback(logging.setLoggerClass, logging.getLoggerClass())
        for logger in (logging.root, logging.getLogger(library)):
            undoing.callback(_restore_logger, logger, logger.handlers[:], logger.propagate, logger.level)
        for owner, name in ((warnings, "formatwarning"), *replaced):
            undoing.callback(_restore_attribute, owner, name, vars(owner).get(name, _ABSENT))
        yield


def _restore_environment(environment: dict[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def _restore_logger(logger: logging.Logger, handlers: list[logging.Handler], propagate: bool, level: int) -> None:
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


def _restore_attribute(owner: Any, name: str, value: Any) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)
