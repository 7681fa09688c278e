"""The dtypes in which a model computes."""
