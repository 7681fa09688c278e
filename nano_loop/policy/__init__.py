"""The precision of products in set-up models: kernels query it, and measured algorithms are chosen within it."""
