"""Compare nano_loop with its alternatives: `make bench`."""
