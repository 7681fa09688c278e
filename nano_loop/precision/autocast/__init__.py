"""Autocast and its surroundings: op lists, loss scales, conversions and rounding."""
