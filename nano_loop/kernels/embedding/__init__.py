"""Embedding lookups and the gradients of their tables."""
