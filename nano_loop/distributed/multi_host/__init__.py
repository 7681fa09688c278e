"""Transports between several hosts."""
