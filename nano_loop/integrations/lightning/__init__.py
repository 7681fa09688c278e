"""The common part of Lightning's two packages, `lightning.pytorch` and `pytorch_lightning`: neither is imported."""
