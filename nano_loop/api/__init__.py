"""What users call: the decorator, `TorchNano`, the context manager, and the functions beside them."""
