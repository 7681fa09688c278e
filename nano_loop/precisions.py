"""The precisions, in one table: in which dtypes parameters, products and inputs are, and whether gradients are scaled.

The steps, Fabric's side, Lightning's side and the documentation read it. Outputs of models are fp32 in each of them, so
that losses and metrics need no change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrecisionKind:
    """A precision.

    Attributes
    ----------
    name : str
        Fabric's name of it.
    parameters : torch.dtype or None
        What floating-point parameters, buffers and inputs are cast to for the run. None: they stay as they are.
    autocast : torch.dtype or None
        What autocast casts the inputs of matrix products and convolutions to. None: no autocast.
    scaled : bool
        Whether gradients are scaled inside the model, since small ones are zero in its dtype.
    summary : str
        What the report says.
    """

    name: str
    parameters: torch.dtype | None = None
    autocast: torch.dtype | None = None
    scaled: bool = False
    summary: str = ""

    @property
    def compute(self) -> torch.dtype:
        """The dtype in which models compute matrix products."""
        return self.autocast or self.parameters or torch.float32


#: By the name that Fabric and Lightning have for each.
PRECISIONS = {
    each.name: each
    for each in (
        PrecisionKind("32-true"),
        PrecisionKind("64-true", parameters=torch.float64, summary="parameters and inputs fp64, outputs fp32"),
        PrecisionKind("bf16-mixed", autocast=torch.bfloat16, summary="bf16 autocast, outputs fp32"),
        PrecisionKind("bf16-true", parameters=torch.bfloat16, summary="parameters and inputs bf16, outputs fp32"),
        PrecisionKind(
            "16-mixed", autocast=torch.float16, scaled=True, summary="fp16 autocast, outputs fp32, scaled gradients"
        ),
    )
}
#: Fabric's names of what a CPU cannot do.
OF_GPUS = ("16-true", "transformer-engine", "transformer-engine-float16")
#: What people write for some of them.
SHORT_NAMES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
