"""Rejects options that are reserved for a later version. Remove an entry when its option is implemented."""

from __future__ import annotations

from nano_loop.errors import NanoError, problem
from nano_loop.options import Options


def refuse_what_is_not_in_this_version(options: Options) -> None:
    """Raise a `NanoError` that names every option that this version does not support.

    Parameters
    ----------
    options : Options
        The options.
    """
    if options.distributed_backend == "ray":
        given = f"{options.given['distributed_backend']}: not in this version of nano_loop"
        raise NanoError(problem(given, "this version trains in processes that it starts itself", "Leave it out"))
