"""Unmodified PyTorch loops, each run plain and accelerated, must have equal results."""
