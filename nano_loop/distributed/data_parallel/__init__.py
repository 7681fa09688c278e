"""Gradients become the mean over the ranks when a backward ends."""
