"""What the definitions of all custom operators share: their namespace, a tag, and what keeps saved tensors."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

NAMESPACE = "nano_loop"
#: Of operators that draw random numbers.
DRAWS = (torch.Tag.nondeterministic_seeded,)


class Context(SimpleNamespace):
    """What an autograd function of nano_loop gets in place of torch's context: it keeps what is saved."""

    saved_tensors: tuple[Tensor | None, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors as `saved_tensors`."""
        self.saved_tensors = tensors
