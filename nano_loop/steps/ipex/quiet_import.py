"""Imports a library that changes the process while it is imported, and puts back what can be put back."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from nano_loop.intercept.operators import overridden, plainly
from nano_loop.kernels.bernoulli import by_torch

_ABSENT = object()


@contextmanager
def leaving_no_trace(*replaced: tuple[Any, str]) -> Iterator[None]:
    """Put back, after an import, the environment, logging, warnings' filters and attributes; say nothing meanwhile.

    What the import prints through Python's logging, and torch's warning that kernels are overridden, stays unsaid.
    Kernels that the library has registered with torch stay: torch has no way to take them back.

    Parameters
    ----------
    *replaced : tuple of object and str
        Attributes that the import replaces, each by its owner and its name. An attribute that the owner only inherits
        is inherited again.
    """
    with ExitStack() as undoing:
        undoing.enter_context(warnings.catch_warnings())
        undoing.callback(_restore_environment, dict(os.environ))
        undoing.callback(_restore_logging, logging.getLoggerClass(), logging.root.handlers[:])
        undoing.callback(logging.disable, logging.root.manager.disable)
        for owner, name in replaced:
            undoing.callback(_restore_attribute, owner, name, vars(owner).get(name, _ABSENT))
        logging.disable(logging.CRITICAL)
        os.environ["TORCH_WARM_POOL"] = "0"  # torch's compiler, where it is imported too, would start its processes
        # torch says once a process, from C++, that a kernel is overridden. Saying it to nobody before leaves nothing.
        with overridden("bernoulli_.float", plainly(by_torch), "CPU"):
            yield


def _restore_environment(environment: dict[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def _restore_logging(logger_class: type[logging.Logger], handlers: list[logging.Handler]) -> None:
    logging.setLoggerClass(logger_class)
    logging.root.handlers[:] = handlers


def _restore_attribute(owner: Any, name: str, value: Any) -> None:
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)
