"""Untouched PyTorch loops, each run plain and accelerated, with equal results."""
