"""What `torch.compile` makes of a model: which parts are compiled, with which arguments."""
