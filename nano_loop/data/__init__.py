"""Loaders on one rank: their worker processes, and the random states of samplers."""
