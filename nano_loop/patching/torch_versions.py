"""Which torch this is, for what its versions do differently when a process starts or joins a group."""

import torch


def is_older_than(major: int, minor: int) -> bool:
    """Return whether this torch is older than a version."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < (major, minor)
