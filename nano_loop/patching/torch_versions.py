"""Checks for torch's version. All version-dependent code is here or in one of the places below.

- Whether torch returns the kernels of operators, which most of our functions call (2.9 and later):
  `nano_loop.patching.operators.gives_kernels`.
- Private names of torch: the modules in this folder whose names begin with ``torch_private``, each with its test.
- How autocast handles operators: `nano_loop.precision.autocast.default_ops` and `widest_dtype`.
- IPEX, which requires torch 2.8: `nano_loop.integrations.ipex`.
"""

import torch


def is_older_than(major: int, minor: int) -> bool:
    """Return whether this torch is older than a version."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) < (major, minor)
