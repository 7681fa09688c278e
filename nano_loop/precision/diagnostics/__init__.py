"""Logs of what reduced precision does."""
