"""Ranks on this host that nano_loop starts itself, as Python processes."""
