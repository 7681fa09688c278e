"""Custom operators of torch for nano_loop's kernels, which Inductor calls as they are and does not decompose.

Each has a function for the CPU, one that gives the outputs' shapes while torch traces, and one for the gradient. They
are registered when this package is imported, in the namespace ``nano_loop``.

Operators that draw random numbers take a number as well: torch removes a second call with the same arguments, although
it would draw other numbers.
"""

from nano_loop.compiling.operators import attention, batch_norm, blocked_attention, cross_entropy, masks

__all__ = ["attention", "batch_norm", "blocked_attention", "cross_entropy", "masks"]
