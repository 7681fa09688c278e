"""The common part for Lightning's two packages, `lightning.pytorch` and `pytorch_lightning`. It imports neither."""
