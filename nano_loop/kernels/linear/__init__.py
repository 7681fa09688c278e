"""Linear layers and products of matrices."""
