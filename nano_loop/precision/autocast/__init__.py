"""Autocast and its surroundings: op lists, conversions and rounding."""
