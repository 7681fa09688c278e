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
    asked = {
        "distributed_backend": options.distributed_backend == "ray",
        "precision": options.precision in ("64-true", "16-mixed", "bf16-true"),
        "bf16_ops": bool(options.bf16_ops),
        "fp32_ops": bool(options.fp32_ops),
    }
    missing = [options.given[name] for name, is_asked in asked.items() if is_asked]
    if missing:
        allowed = 'this version trains with precision 32, "bf16" or "auto", in processes that it starts itself'
        raise NanoError(problem(f"{', '.join(missing)}: not in this version of nano_loop", allowed, "Leave it out"))
