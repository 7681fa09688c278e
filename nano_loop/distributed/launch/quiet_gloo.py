"""Keeps gloo's greeting out of what the user's script prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from nano_loop.cpu.native_output import without_lines
from nano_loop.patching.torch_versions import is_older_than


@contextmanager
def without_greeting() -> Iterator[None]:
    """Leave the line in which gloo says that it is connected out of standard output.

    The gloo in torch 2.8 prints it from C++, always; later ones have ``GLOO_LOG_LEVEL`` for it (pytorch/gloo#467),
    which leaves it out unless asked.
    """
    with without_lines(1, b"[Gloo] ") if is_older_than(2, 13) else nullcontext():
        yield
