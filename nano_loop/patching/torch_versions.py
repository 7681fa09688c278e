"""Which torch this is. What depends on its version is asked here, or stands in one of these places.

- Whether torch returns the kernels of operators, without which most of ours have nothing to call (2.9 and later):
  `nano_loop.patching.operators.operators.gives_kernels`.
- Private names of torch: the modules of this folder whose names begin with ``torch_private``, each with its test.
- What autocast does with operators: `nano_loop.precision.autocast.default_ops` and `widest_dtype`.
- IPEX, which works with torch 2.8 alone: `nano_loop.integrations.ipex`.
"""

import torch


def is_older_than(major: int, minor: int) -> bool:
    """Return whether this torch is older than a version."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < (major, minor)
