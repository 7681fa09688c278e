"""The table of precisions: the dtypes of parameters, products and inputs.

The steps, the integrations of Fabric and Lightning, and the documentation use it. Outputs of models are always fp32, so
that losses and metrics need no change. The table has the names of dtypes, so that reading it does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PrecisionKind:
    """A precision."""

    name: str  # Fabric's name
    #: The dtype to which floating-point parameters, buffers and inputs are cast for the run. None: they are unchanged.
    parameters_name: str | None = None
    #: The dtype to which autocast casts the inputs of matrix products and convolutions. None: no autocast.
    autocast_name: str | None = None
    #: The dtype to which large products of fp32 tensors round inputs, with sums and results in fp32; None for no dtype.
    products_name: str | None = None
    summary: str = ""  # the report line

    @property
    def compute_name(self) -> str:
        """The name of the dtype of matrix products, as the model's operators see it."""
        return self.autocast_name or self.parameters_name or "float32"

    @property
    def parameters(self) -> torch.dtype | None:
        """The dtype of `parameters_name`."""
        return None if self.parameters_name is None else _dtype(self.parameters_name)

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of `autocast_name`."""
        return None if self.autocast_name is None else _dtype(self.autocast_name)

    @property
    def products(self) -> torch.dtype | None:
        """The dtype of `products_name`."""
        return None if self.products_name is None else _dtype(self.products_name)

    @property
    def autocast_by_hand(self) -> torch.dtype | None:
        """The dtype of the equivalent autocast in plain torch code, or None."""
        return self.autocast if self.products_name is None else _dtype("bfloat16")

    @property
    def compute(self) -> torch.dtype:
        """The dtype of `compute_name`."""
        return _dtype(self.compute_name)


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


#: The allowed names, from the two tables, for type checkers.
PrecisionName = (
    Literal[32, 64, 16, "32", "64", "16", "bf16", "auto"]
    | Literal["32-true", "64-true", "bf16-mixed", "bf16-products", "bf16-true", "16-mixed"]
)
#: By Fabric's and Lightning's names.
PRECISIONS = {
    kind.name: kind
    for kind in (
        PrecisionKind("32-true"),
        PrecisionKind("64-true", parameters_name="float64", summary="parameters and inputs fp64, outputs fp32"),
        PrecisionKind("bf16-mixed", autocast_name="bfloat16", summary="bf16 autocast, outputs fp32"),
        PrecisionKind("bf16-products", products_name="bfloat16", summary="fp32, with bf16 inside large products"),
        PrecisionKind("bf16-true", parameters_name="bfloat16", summary="parameters and inputs bf16, outputs fp32"),
        PrecisionKind(
            "16-mixed",
            products_name="float16",
            summary="fp32, with fp16's rounding inside large products; as fast as precision=32 at best",
        ),
    )
}
#: Fabric's names of precisions that CPUs do not support.
OF_GPUS = ("16-true", "transformer-engine", "transformer-engine-float16")
#: Aliases that users may write.
SHORT_NAMES = {
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
    "auto": "bf16-products",  # which is fp32 if nothing rounds
}
