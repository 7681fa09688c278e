"""Imports a library whose import changes the process, and undoes the changes that can be undone."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from nano_loop.kernels.dropout.bernoulli import by_torch
from nano_loop.patching.operators.operators import overridden, plainly

_ABSENT = object()


@contextmanager
def leaving_no_trace(*replaced: tuple[Any, str]) -> Iterator[None]:
    """Restore the environment, logging, warning filters and attributes after an import, and silence the import.

    Log messages of the import, and torch's warning about overridden kernels, are suppressed. Kernels that the library
    registered stay registered, since torch cannot unregister them.

    Parameters
    ----------
    *replaced : tuple of object and str
        Attributes that the import replaces, each as an owner and a name. An attribute that the owner inherited is
        inherited again.
    """
    with ExitStack() as undoing:
        undoing.enter_context(warnings.catch_warnings())
        undoing.callback(_restore_environment, dict(os.environ))
        undoing.callback(_restore_logging, logging.getLoggerClass(), logging.root.handlers[:])
        undoing.callback(logging.disable, logging.root.manager.disable)
        for owner, name in replaced:
            undoing.callback(_restore_attribute, owner, name, vars(owner).get(name, _ABSENT))
        logging.disable(logging.CRITICAL)
        os.environ["TORCH_WARM_POOL"] = "0"  # otherwise torch's compiler, if imported too, starts worker processes
        # torch warns only once per process, from C++, about an overridden kernel. This override uses up the warning.
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
