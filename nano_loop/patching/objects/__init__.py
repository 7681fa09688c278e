"""The user's objects: optimizers, loaders, and nested collections of tensors."""
