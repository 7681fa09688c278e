"""A table of the changes that a program may make between two steps of a loop."""

from . import calls, layers, process, training, weights
from .program import built, changed_by
from .table import ROWS

__all__ = ["ROWS", "built", "calls", "changed_by", "layers", "process", "training", "weights"]
