"""Comparisons of accelerated models with plain ones."""
