"""Intel Extension for PyTorch: the step, the repairs of wrong kernels, and the comparison of speeds."""

from nano_loop.steps.ipex.step import Ipex

__all__ = ["Ipex"]
