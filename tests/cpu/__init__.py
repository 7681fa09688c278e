"""Tests of the room `cpu` with recordings of real machines."""
