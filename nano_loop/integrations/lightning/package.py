"""The registration of the strategy with one of Lightning's packages, and the error where it is missing."""

from __future__ import annotations

from typing import Any

from nano_loop.errors import error_message


def register(strategy: type, strategies: Any) -> None:
    """Let Lightning's Trainer find the strategy by its name."""
    if "nano" not in strategies:
        strategies.register("nano", strategy, description="CPU training, accelerated by nano_loop")


def lightning_is_missing(package: str, needed_by: str) -> ImportError:
    """Return the error of a module of nano_loop that needs one of Lightning's packages."""
    expected = f"{needed_by} is over {package}"
    return ImportError(error_message(f"{package} is not installed", expected, 'Run pip install "nano-loop[lightning]"'))
