"""Measures nano_loop beside what a user would pick instead: `make bench`."""
