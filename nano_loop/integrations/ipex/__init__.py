"""Intel Extension for PyTorch: the step, replacements of faulty kernels, and the speed comparison."""

from nano_loop.integrations.ipex.step import Ipex

__all__ = ["Ipex"]
