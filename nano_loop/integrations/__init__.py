"""Integrations of other libraries, one folder each."""
