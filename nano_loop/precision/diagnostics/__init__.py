"""Logs of the effects of reduced precision."""
