"""The watch over what a run of several ranks leaves, for scripts too."""

from distributed.conftest import nothing_left

__all__ = ["nothing_left"]
