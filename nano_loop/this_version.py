"""What a later version will do, and this one refuses; a line goes with each issue that is built."""

from __future__ import annotations

from nano_loop.config import NanoConfig
from nano_loop.errors import NanoError, problem


def refuse_what_is_not_in_this_version(config: NanoConfig) -> None:
    """Raise a `NanoError` that names every option that a later version will honour.

    Parameters
    ----------
    config : NanoConfig
        The options.
    """
    asked = {
        "distributed_backend": config.distributed_backend == "ray",
        "precision": config.precision in ("64-true", "16-mixed", "bf16-true"),
        "bf16_ops": bool(config.bf16_ops),
        "fp32_ops": bool(config.fp32_ops),
    }
    missing = [config.given[name] for name, is_asked in asked.items() if is_asked]
    if missing:
        allowed = 'this version trains with precision 32, "bf16" or "auto", in processes of its own'
        raise NanoError(problem(f"{', '.join(missing)}: not in this version of nano_loop", allowed, "Leave it out"))
