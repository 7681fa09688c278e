"""Whose batches are whose, in an order that all ranks agree on."""
