"""Ranks on this host that nano_loop itself starts as Python processes."""
