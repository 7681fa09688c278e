"""Replacements for torch's kernels: attention, gradients of convolutions, random masks."""
