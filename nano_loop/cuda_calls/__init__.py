"""Runs programs that were written for a GPU on the CPU, unchanged."""
