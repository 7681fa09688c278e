"""The lookups of embeddings, and the gradients of their tables."""
