"""The public API: the decorator, `TorchNano`, the context manager, and helper functions."""
