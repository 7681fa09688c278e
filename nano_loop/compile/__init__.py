"""The use of `torch.compile`: the parts of a model to compile, and the arguments."""
