"""Random masks."""
