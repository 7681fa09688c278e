"""What Lightning's two packages, `lightning.pytorch` and `pytorch_lightning`, have in common: neither is imported."""
