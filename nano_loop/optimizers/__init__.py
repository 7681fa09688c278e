"""Optimizers' fused steps, and their guards."""
