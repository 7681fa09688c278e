"""Autocast, and related features: operator lists, conversions and rounding."""
