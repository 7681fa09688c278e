"""Replacements of torch's kernels for operators of set-up models."""
