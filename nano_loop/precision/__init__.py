"""The precision in which a model computes."""
