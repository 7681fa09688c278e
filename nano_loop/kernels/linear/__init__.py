"""Linear layers and matrix products."""
