"""The parameters of what was set up, for functions that get parameters or gradients, and no model or optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nano_loop.patching.patch_table import process_wide

#: Of each user, the parameters that kernels may update, by their ids.
_covered: list[dict[int, Any]] = process_wide("parameters of what was set up", [])


@contextmanager
def covered(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let kernels update such parameters and their gradients. The parameters are held weakly."""
    table = {id(parameter): weakref.ref(parameter) for parameter in parameters}
    del parameters
    _covered.append(table)
    try:
        yield
    finally:
        _covered[:] = [other for other in _covered if other is not table]


def are_covered(parameters: Sequence[Any]) -> bool:
    """Whether the parameters of a call belong to what was set up, by the first of them, and no compiler traces it."""
    if not parameters or torch.compiler.is_compiling():
        return False
    references = [table[id(parameters[0])] for table in _covered if id(parameters[0]) in table]
    return any(reference() is parameters[0] for reference in references)
