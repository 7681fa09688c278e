"""Says which products of fp32 tensors round their inputs to bf16: large ones in ``precision="bf16-products"``.

Sums and results are in fp32, so nothing but the product itself knows of bf16.
"""

from __future__ import annotations

from nano_loop.patching.ownership import rule_for

#: The name of the rule of calls into models whose products round their inputs. It is called with the kind of each
#: product that does, and its number of multiplications.
RULE = "products in bf16"

PRODUCT, CONVOLUTION, ATTENTION, LSTM = "product", "convolution", "attention", "lstm"
#: Minimum number of multiplications by the kind of product. Below it, what surrounds the product exceeds the gain.
MIN_MULTIPLICATIONS = {PRODUCT: 1 << 23, CONVOLUTION: 1 << 24, ATTENTION: 1 << 22, LSTM: 1 << 22}


def is_large(kind: str, multiplications: int) -> bool:
    """Return whether a product is large enough to be rounded."""
    return multiplications >= MIN_MULTIPLICATIONS[kind]


def rounds_products() -> bool:
    """Return whether torch computes for a model whose products round their inputs."""
    return rule_for(RULE) is not None


def note(kind: str, multiplications: int) -> None:
    """Tell the rule of a product that rounds its inputs."""
    rule = rule_for(RULE)
    if rule is not None:
        rule(kind, multiplications)
